"""Unpacking an archive writes to its own directory only."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.errors import LoadError
from headrace_python import archive
from headrace_python import archive as archives
from headrace_python.archive import unpack

Pack = Callable[..., Path]


def file(name: str, text: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return _member(name, tarfile.REGTYPE, size=len(text), **fields), text


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return _member(name, kind, linkname=target), b""


def special(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return _member(name, kind), b""


def _member(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for key, value in fields.items():
        setattr(member, key, value)
    return member


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    def write(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
        path = tmp_path / "archive"
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            for member, text in members:
                archive.addfile(member, io.BytesIO(text))
        return path

    return write


EVIL: Sequence[tuple[str, str, list[tuple[tarfile.TarInfo, bytes]]]] = [
    ("../out", "climbs out with '..'", [file("../out")]),
    ("a/../../out", "climbs out with '..'", [file("a/../../out")]),
    ("/tmp/out", "has an absolute path", [file("/tmp/out")]),
    ("l", "is a link that leads out, to '/etc'", [link("l", "/etc")]),
    ("l", "is a link that leads out, to '..'", [link("l", "..")]),
    ("a/l", "is a link that leads out, to '../../x'", [file("a/f"), link("a/l", "../../x")]),
    ("x/y/b", "is a link that leads out, to 'a/..'", [link("x/y/a", "../.."), link("x/y/b", "a/..")]),
    ("l", "is a link that leads out, to ''", [link("l", "")]),
    ("l/x", "lies behind the link 'l'", [file("d/f"), link("l", "d"), file("l/x")]),
    ("l", "lies behind the link 'l'", [link("l", "d"), file("l")]),
    ("d", "comes twice", [file("d/f"), link("d", "e")]),
    ("f", "comes twice", [file("f"), file("f")]),
    ("f/x", "lies below a file", [file("f"), file("f/x")]),
    ("h", "has an absolute path", [link("h", "/etc/passwd", tarfile.LNKTYPE)]),
    ("h", "is a hard link to 'x'", [link("h", "x", tarfile.LNKTYPE)]),
    (
        "h",
        "lies behind the link 'a/b/l'",
        [file("a/b/f"), link("a/b/l", "../../f"), link("h", "a/b/l", tarfile.LNKTYPE)],
    ),
    ("null", "is a device or a pipe", [special("null", tarfile.CHRTYPE)]),
    ("disk", "is a device or a pipe", [special("disk", tarfile.BLKTYPE)]),
    ("pipe", "is a device or a pipe", [special("pipe", tarfile.FIFOTYPE)]),
]


@pytest.mark.parametrize(("name", "reason", "members"), EVIL, ids=[f"{name}: {why}" for name, why, _ in EVIL])
def test_an_unsafe_member_is_refused_by_name(
    pack: Pack, tmp_path: Path, name: str, reason: str, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    archive = pack(file("good"), *members)
    before = set(tmp_path.iterdir())
    with pytest.raises(LoadError) as raised:
        unpack(archive, tmp_path / "into")
    assert raised.value.message.startswith(f"environment '{archive}' is refused: member '{name}' {reason}")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "into"}


def test_a_whole_archive_is_unpacked_as_it_was(pack: Pack, tmp_path: Path) -> None:
    members = [
        file("bin/python3", b"elf", mode=0o4777, mtime=1_600_000_000),
        link("bin/python", "python3"),
        link("lib/deep/python", "../../bin/python"),
        link("copy", "bin/python3", tarfile.LNKTYPE),
        file("lib/" + "long" * 60, b"pax"),
        special("empty", tarfile.DIRTYPE),
    ]
    for mode in ("w", "w:gz", "w:bz2", "w:xz"):
        into = tmp_path / mode.replace(":", "-")
        unpack(pack(*members, mode=mode), into)
        assert (into / "lib/deep/python").read_bytes() == b"elf"
        assert (into / "bin/python").readlink() == Path("python3")
        assert (into / "copy").samefile(into / "bin/python3")
        assert (into / "lib" / ("long" * 60)).read_bytes() == b"pax"
        assert (into / "empty").is_dir()
        found = (into / "bin/python3").stat()
        assert (found.st_mode & 0o7777, found.st_mtime) == (0o755, 1_600_000_000)


def test_an_archive_bomb_is_refused(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "FREE_BYTES", 1 << 20)
    zeros = bytes(4 << 20)
    archive = pack(file("a", zeros[: 1 << 19]), file("bomb", zeros))
    with pytest.raises(LoadError, match="member 'bomb' is more than fits: an archive of this size may hold 1 MiB"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "into/bomb").exists()


def test_a_flood_of_members_is_refused(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    with pytest.raises(LoadError, match="member 'd3' is one of more than 3"):
        unpack(pack(*(special(f"d{number}", tarfile.DIRTYPE) for number in range(5))), tmp_path / "into")


def test_a_header_that_declares_a_huge_size_is_not_read(tmp_path: Path) -> None:
    member = _member("././@PaxHeader", tarfile.XHDTYPE, size=1 << 32)
    (tmp_path / "archive").write_bytes(member.tobuf() + bytes(2048))
    with pytest.raises(LoadError, match="is no whole tar archive: a header is 4294967296 bytes long"):
        unpack(tmp_path / "archive", tmp_path / "into")


@pytest.mark.parametrize(
    "content", [b"", b"no archive at all", b"\x1f\x8bbroken", b"BZh9broken", b"\xfd7zXZ\x00broken"]
)
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(LoadError, match="is no whole tar archive: "):
        unpack(tmp_path / "archive", tmp_path / "into")


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_half_an_archive_is_not_taken_for_a_whole_one(pack: Pack, tmp_path: Path, mode: str, part: float) -> None:
    path = pack(*(file(f"f{number}", os.urandom(3000)) for number in range(100)), mode=mode)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(LoadError, match="is no whole tar archive: "):
        unpack(path, tmp_path / "into")


def test_an_archive_cut_between_two_members_is_not_taken_for_a_whole_one(pack: Pack, tmp_path: Path) -> None:
    path = pack(file("a"), file("b"), mode="w")
    path.write_bytes(path.read_bytes()[: 2 * tarfile.BLOCKSIZE])
    with pytest.raises(LoadError, match="is no whole tar archive: its end is missing"):
        unpack(path, tmp_path / "into")
