"""Archives that could do harm: nothing is written outside, and the error names the member and the rule."""

from __future__ import annotations

import gzip
import io
import random
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from headrace_archive import Archive, members
from tests.agents.archive.packing import PACKERS, items_of, tar, tar_gz, zipped
from tests.agents.loading import Loader

Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path) -> Iterator[Refusal]:
    """Loads an archive: ``refusal(content, suffix)`` returns why it is refused. Nothing appears outside."""
    (tmp_path / "canary").write_bytes(b"canary")
    (place := tmp_path / "a/b/c").mkdir(parents=True)
    load = Loader(Archive, place)

    def act(content: bytes, suffix: str = ".tar", **parameters: str) -> str:
        message = load({f"m{suffix}": content}, **parameters)
        return message if isinstance(message, str) else ""

    yield act
    inside = [path for path in tmp_path.rglob("*") if place not in path.parents and path not in (place, *place.parents)]
    assert inside == [tmp_path / "canary"]
    assert (tmp_path / "canary").read_bytes() == b"canary"
    assert all(not path.is_symlink() and (path.is_dir() or path.is_file()) for path in place.rglob("*"))


BAD_NAMES = {
    "../x": "it climbs out with '..'",
    "a/../../x": "it climbs out with '..'",
    "a/../x": "it contains '..'",
    "/etc/x": "it is absolute",
    "//x": "it is absolute",
    "a\\..\\x": "it contains a backslash",
    "..\\x": "it contains a backslash",
    "a\nb": "it contains control characters, or is not UTF-8",
    "a\x1b[31m": "it contains control characters, or is not UTF-8",
    "a" * 256: "it is longer than 1024 bytes, or a part of it than 255",
    "é" * 128: "it is longer than 1024 bytes, or a part of it than 255",
    "/".join(["abcdefgh"] * 130): "it is more than 32 directories deep",
    "/".join(["a"] * 33): "it is more than 32 directories deep",
    "/".join(["a" * 200] * 6): "it is longer than 1024 bytes, or a part of it than 255",
}


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_outside_the_directory_is_refused(refusal: Refusal, suffix: str, name: str) -> None:
    message = refusal(PACKERS[suffix](items_of({"1/first": b"", name: b"x"})), suffix)
    assert message.startswith(f"agent 'archive' of model 'm': 'm{suffix}' is not unpacked: member '")
    assert message.endswith(BAD_NAMES[name])
    assert len(message) < 300
    assert message.isprintable()


def test_a_name_that_is_no_utf_8_or_has_a_nul_is_refused(refusal: Refusal) -> None:
    archive_bytes = tar(items_of({"1/xxxx": b""}), tarfile.USTAR_FORMAT)
    header = bytearray(archive_bytes[:512].replace(b"1/xxxx", b"1/\xff\xfex/"))
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    assert "is not UTF-8" in refusal(bytes(header) + archive_bytes[512:])
    assert "it contains NUL" in refusal(zipped(items_of({"1/abcd": b""})).replace(b"1/abcd", b"1/a\0cd"), ".zip")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a FIFO"),
        (b"Z", "no regular file"),
    ],
)
@pytest.mark.parametrize("target", ["canary", "../../../canary", "/etc/passwd"])
def test_only_files_and_directories_are_unpacked_of_a_tar(
    refusal: Refusal, kind: bytes, what: str, target: str
) -> None:
    message = refusal(tar([("1/w", b"", {}), ("x", b"", {"type": kind, "linkname": target})]))
    assert message.endswith(f"member 'x' is {what}: only files and directories are unpacked")


def test_no_file_is_written_through_a_link(refusal: Refusal) -> None:
    link = ("x", b"", {"type": tarfile.SYMTYPE, "linkname": "../../.."})
    assert "member 'x' is a link" in refusal(tar([link, ("x/canary", b"overwritten", {})]))
    as_link = {"external_attr": (stat.S_IFLNK | 0o777) << 16}
    assert "member 'x' is a link" in refusal(zipped([("x", b"../../..", as_link), ("x/canary", b"", {})]), ".zip")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_only_files_and_directories_are_unpacked_of_a_zip(refusal: Refusal, kind: int) -> None:
    message = refusal(zipped([("x", b"/etc/passwd", {"external_attr": (kind | 0o644) << 16})]), ".zip")
    assert "member 'x' is a " in message
    assert message.endswith("only files and directories are unpacked")


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6644])
def test_set_uid_is_refused(refusal: Refusal, mode: int) -> None:
    assert refusal(tar([("x", b"", {"mode": mode})])).endswith("member 'x' is set-uid or set-gid")
    attributes = {"external_attr": (stat.S_IFREG | mode) << 16}
    assert refusal(zipped([("x", b"", attributes)]), ".zip").endswith("member 'x' is set-uid or set-gid")


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("1/w", "1/w", "'1/w' is there twice"),
        ("1/w", "./1//w", "'1/w' is there twice"),
        ("1/w", "1/W", "'1/W' and '1/w' differ in case or Unicode form only"),
        ("a/w", "A/v", "'A' and 'a' differ in case or Unicode form only"),
        ("straße", "STRASSE", "'STRASSE' and 'straße' differ in case or Unicode form only"),
        ("\u00e9", "e\u0301", "differ in case or Unicode form only"),
        ("a", "a/b", "'a' is a file and a directory"),
        ("a/b", "a", "'a' is a file and a directory"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_clashing_names_are_refused(refusal: Refusal, suffix: str, first: str, second: str, why: str) -> None:
    message = refusal(PACKERS[suffix]([(first, b"1", {}), (second, b"2", {})]), suffix)
    assert message.endswith(why)


# ---------------------------------------------------------------------- bombs


def bomb(suffix: str, size: int) -> bytes:
    return PACKERS[suffix](items_of({"1/w": bytes(size)}))


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.zst", ".zip"])
def test_a_bomb_is_refused_before_it_is_unpacked(
    refusal: Refusal, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_RATIO_FREE_BYTES", 1 << 20)
    content = bomb(suffix, 3 << 20)
    assert len(content) * 300 < 3 << 20
    message = refusal(content, suffix)
    assert message.endswith("it unpacks to more than 100 times its size; parameter 'max_ratio' sets this limit")
    written = sum(path.stat().st_size for path in tmp_path.rglob("w"))
    assert written <= 1 << 20
    message = refusal(content, suffix, max_ratio="100000", max_bytes="1000000")
    assert message.endswith("it unpacks to more than 1000000 bytes; parameter 'max_bytes' sets this limit")
    assert refusal(content, suffix, max_ratio="100000") == ""


def test_the_limits_apply_to_all_members_together(refusal: Refusal) -> None:
    files = {f"1/{n}": bytes(1000) for n in range(10)}
    for suffix in PACKERS:
        assert "more than 9999 bytes" in refusal(PACKERS[suffix](items_of(files)), suffix, max_bytes="9999")
        assert "more than 9 members" in refusal(PACKERS[suffix](items_of(files)), suffix, max_files="9")
        assert refusal(PACKERS[suffix](items_of(files)), suffix, max_files="10") == ""


def test_a_minimum_of_free_disk_space_is_kept(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": (256 << 20) + 5000}))
    assert "more than the 5000 bytes that are free for it" in refusal(bomb(".zip", 6000), ".zip")


def test_a_zip_with_false_sizes_is_refused(refusal: Refusal) -> None:
    content = bytearray(bomb(".zip", 1 << 20))
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        struct.pack_into("<I", content, content.index(signature) + offset, 10)
    assert "is damaged" in refusal(bytes(content), ".zip")


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_headers_take_little_memory(refusal: Refusal) -> None:
    """A PAX header of 128 MiB, and one that declares 8 EiB."""
    huge = tar([("x", b"", {"pax_headers": {"comment": "y" * (32 << 20)}})])
    packed = gzip.compress(huge, 1)
    del huge
    assert peak_bytes(lambda: refusal(packed, ".tar.gz", max_ratio="100000")) < 8 << 20
    assert "it has a header of" in refusal(packed, ".tar.gz", max_ratio="100000")


def test_a_directory_of_a_zip_takes_little_memory(refusal: Refusal) -> None:
    entry = zipped(items_of({"a": b""}))
    start, end = entry.index(b"PK\1\2"), entry.index(b"PK\5\6")
    count = 65_535
    tail = bytearray(entry[end:])
    struct.pack_into("<HHII", tail, 8, count, count, (end - start) * count, start)
    content = entry[:start] + entry[start:end] * count + bytes(tail)
    message: list[str] = []
    assert peak_bytes(lambda: message.append(refusal(content, ".zip", max_files="100"))) < 8 << 20
    assert message[0].endswith("its directory has more entries than parameter 'max_files' allows")


def test_a_zstd_window_is_bounded(refusal: Refusal) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=29, enable_ldm=True)
    archive_bytes = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(archive_bytes, closefd=False) as writer:
        writer.write(tar(items_of({"1/w": b"w"})))
    assert "it is damaged: " in refusal(archive_bytes.getvalue(), ".tar.zst")


def test_a_sparse_file_is_refused(refusal: Refusal) -> None:
    """A sparse file of 8 GiB takes 1 KiB in an archive (PAX format 0.1)."""
    sparse = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(8 << 30), "GNU.sparse.name": "1/w"}
    message = refusal(tar([("1/w", b"x", {"pax_headers": sparse})]))
    assert message.endswith("member '1/w' is no regular file: only files and directories are unpacked")


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_truncated_archive_is_refused(refusal: Refusal, suffix: str) -> None:
    content = PACKERS[suffix](items_of({"1/w": random.Random(1).randbytes(3000), "2/w": b"w" * 1024}))
    ends = {len(tar(items_of({"1/w": bytes(3000)}))), *range(0, len(content) - 12, 97)}
    if suffix == ".tar":  # it ends with blocks of zeros
        ends = {*range(0, len(content.rstrip(b"\0")), 256)}
    for end in sorted(end for end in ends if end < len(content) - 12):
        assert refusal(content[:end], suffix), f"{end} of {len(content)} bytes are unpacked"


def test_data_that_differs_from_its_checksum_is_refused(refusal: Refusal) -> None:
    for suffix in (".tar.gz", ".tar.zst", ".zip"):
        content = bytearray(PACKERS[suffix](items_of({"1/w": random.Random(2).randbytes(5000)})))
        content[len(content) // 2] ^= 1
        assert refusal(bytes(content), suffix), suffix


def test_a_damaged_header_between_members_is_an_error(refusal: Refusal) -> None:
    content = bytearray(tar(items_of({"1/w": b"w", "2/w": b"w"}), tarfile.USTAR_FORMAT))
    content[1024 + 148] ^= 1  # the checksum of the second header
    assert refusal(bytes(content)).endswith("it is cut off or damaged: it has no end of archive")


@pytest.mark.parametrize("suffix", PACKERS)
def test_random_damage_raises_nothing_but_a_load_error(refusal: Refusal, suffix: str) -> None:
    chance = random.Random(suffix)
    files = {"1/w": chance.randbytes(700), "2/" + "long" * 40: b"x" * 100, "config.pbtxt": b"c"}
    content = PACKERS[suffix](items_of(files)).rstrip(b"\0") + bytes(1024)
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 8))):
            place = chance.randrange(len(changed))
            changed[place : place + chance.choice((0, 1, 1, 4))] = chance.randbytes(chance.choice((0, 1, 1, 4)))
        refusal(bytes(changed), suffix)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (0x01, "member '1/w' is encrypted"),
        (0x20, "it is damaged: compressed patched data (flag bit 5)"),
        (0x40, "it is damaged: strong encryption (flag bit 6)"),
    ],
)
def test_a_zip_with_a_password_or_a_patch_is_refused(refusal: Refusal, flag: int, why: str) -> None:
    content = bytearray(zipped(items_of({"1/w": b"w"})))
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + offset] |= flag
    assert refusal(bytes(content), ".zip").endswith(why)


def test_a_zip_of_another_method_or_version_or_without_names_is_refused(refusal: Refusal) -> None:
    archive_bytes = io.BytesIO()
    with zipfile.ZipFile(archive_bytes, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("1/w", b"w")
    assert "is compressed by method 14, expected 'stored' or 'deflated'" in refusal(archive_bytes.getvalue(), ".zip")
    content = bytearray(zipped(items_of({"1/w": b"w"})))
    content[content.index(b"PK\1\2") + 6] = 99  # the version that is needed to extract it
    assert refusal(bytes(content), ".zip").endswith("it is damaged: zip file version 9.9")
    name = zipped(items_of({"1/é": b"w"})).replace("é".encode(), b"\xff\xff")
    assert "it is damaged: 'utf-8' codec can't decode" in refusal(name, ".zip")
    with zipfile.ZipFile(archive_bytes := io.BytesIO(), "w") as archive:
        archive.writestr(zipfile.ZipInfo(""), b"w")
    assert refusal(archive_bytes.getvalue(), ".zip")


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_that_is_no_archive_is_refused(refusal: Refusal, suffix: str) -> None:
    for content in (b"", b"\0" * 10240, b"GIF89a" * 1000, tar_gz([])[:10]):
        assert refusal(content, suffix).startswith(f"agent 'archive' of model 'm': 'm{suffix}' ")
