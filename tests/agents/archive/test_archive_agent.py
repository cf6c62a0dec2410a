"""Archives of every format become the model that was packed."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import ConfigError
from headrace_archive import Archive
from headrace_testing import AgentConformance
from tests.agents.archive.packing import PACKERS, items_of, tar, zipped
from tests.agents.loading import Loader, files_of, lock_directories, write, write_volume


class TestTarZst(AgentConformance):
    plugin, agent = "headrace_archive", "archive"
    suffix = ".tar.zst"

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return {f"model{self.suffix}": PACKERS[self.suffix](items_of(files))}, {}

    def damage(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        ((name, content),) = self.prepare(files)[0].items()
        return {name: content[: len(content) // 2]}, {}

    def wrong_parameters(self) -> Mapping[str, str]:
        return {"archive": "../other/model.tar"}


class TestZip(TestTarZst):
    suffix = ".zip"


FILES = {"config.pbtxt": b"a", "1/model.onnx": bytes(range(256)) * 10_000, "2/deep/er/part": b"", "labels.txt": b"l"}


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(Archive, tmp_path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_every_format_is_unpacked_and_the_archive_is_left_out(load: Loader, suffix: str) -> None:
    assert files_of(load({f"model{suffix}": PACKERS[suffix](items_of(FILES))})) == FILES
    assert (
        files_of(load({f"a/M{suffix.upper()}": PACKERS[suffix](items_of(FILES))}, archive=f"a/M{suffix.upper()}"))
        == FILES
    )


@pytest.mark.parametrize("words", [("--format=gnu",), ("--format=pax",), ("--format=ustar",), ("--format=v7",)])
def test_gnu_tar_archives_are_read(load: Loader, tmp_path: Path, words: tuple[str, ...]) -> None:
    source = tmp_path / "source"
    files = {**FILES, "1/" + "long" * (40 if "v7" not in words[0] and "ustar" not in words[0] else 10): b"x"}
    write(source, files)
    (source / "1/model.onnx").chmod(0o755)
    subprocess.run(["tar", *words, "-czf", tmp_path / "m.tar.gz", "-C", source, "."], check=True)
    unpacked = load({"m.tar.gz": (tmp_path / "m.tar.gz").read_bytes()})
    assert files_of(unpacked) == files
    assert isinstance(unpacked, Path)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in unpacked.rglob("*") if path.name != "model.onnx"}
    assert modes == {0o600, 0o700}
    assert stat.S_IMODE((unpacked / "1/model.onnx").stat().st_mode) == 0o700
    assert stat.S_IMODE((unpacked / "labels.txt").stat().st_mode) == 0o600


def test_a_zip_of_the_library_with_directories_and_modes_is_read(load: Loader) -> None:
    unpacked = load(
        {"m.zip": zipped([("1", None, {}), ("1/t", b"t", {"external_attr": (stat.S_IFREG | 0o755) << 16})])}
    )
    assert files_of(unpacked) == {"1/t": b"t"}
    assert isinstance(unpacked, Path)
    assert stat.S_IMODE((unpacked / "1/t").stat().st_mode) == 0o700


def test_files_beside_the_archive_are_copied(load: Loader) -> None:
    beside = {"config.pbtxt": b"outer", "2/other": b"o", ".hidden": b""}
    unpacked = load({**beside, "m.tar": tar(items_of({"1/w": b"w", ".git/x": b"", "1/__pycache__/y": b""}))})
    assert files_of(unpacked) == {"config.pbtxt": b"outer", "2/other": b"o", "1/w": b"w"}


def test_a_volume_of_kubernetes_is_read(tmp_path: Path) -> None:
    volume = write_volume(tmp_path / "volume", {"config.pbtxt": b"c", "m.tar": tar(items_of({"1/w": b"w"}))})
    (tmp_path / "unpacked").mkdir()
    assert files_of(Archive("m", {}).load(volume, lambda: tmp_path / "unpacked")) == {"config.pbtxt": b"c", "1/w": b"w"}


def test_an_empty_version_is_kept(load: Loader) -> None:
    """As that of an ensemble."""
    unpacked = load({"m.tar": tar([("./", None, {}), ("./config.pbtxt", b"c", {}), ("./1/", None, {})])})
    assert isinstance(unpacked, Path)
    assert (unpacked / "1").is_dir()


@pytest.mark.parametrize(("config", "found"), [("archive", b"inner"), ("repository", b"outer")])
def test_the_parameter_chooses_between_two_configs(load: Loader, config: str, found: bytes) -> None:
    files = {"config.pbtxt": b"outer", "m.tar": tar(items_of({"config.pbtxt": b"inner", "1/w": b""}))}
    assert files_of(load(files, config=config))["config.pbtxt"] == found
    result = load(files)
    assert isinstance(result, str)
    assert result.endswith(
        "'m.tar' is not unpacked: config.pbtxt is in it and beside it: parameter 'config' must say which one is used, "
        "'archive' or 'repository'"
    )
    alone = {"config.pbtxt": b"outer", "m.tar": tar(items_of({"1/w": b""}))}
    assert files_of(load(alone, config=config))["config.pbtxt"] == b"outer"


def test_members_are_moved_by_parameters(load: Loader) -> None:
    packed = {"m.tar": tar(items_of({"top/sub/model.onnx": b"m", "top/sub/a/b": b"b"}))}
    assert files_of(load(packed, strip_components="2", into="1")) == {"1/model.onnx": b"m", "1/a/b": b"b"}
    result = load(packed, strip_components="3")
    assert isinstance(result, str)
    assert "'top/sub/model.onnx' has no name below 3 directories ('strip_components')" in result


@pytest.mark.parametrize(
    ("files", "parameters", "why"),
    [
        ({"w": b""}, {}, "the model must have one archive (.tar, .tar.gz, .tgz, .tar.zst, .zip, .mar), and has none"),
        ({"a.tar": b"", "b.zip": b""}, {}, "and has several: a.tar, b.zip; name one by parameter 'archive'"),
        ({"w": b""}, {"archive": "a.tar"}, "'a.tar' cannot be unpacked: No such file or directory"),
        ({"a.tar/w": b""}, {}, "'a.tar' cannot be unpacked"),
        ({"a.tar": tar([])}, {}, "'a.tar' is not unpacked: it has no file"),
        ({"a.tar": tar(items_of({"w": b""})), "w": b""}, {}, "'w' is there twice"),
        ({"a.tar": tar(items_of({"W": b""})), "w": b""}, {}, "'W' and 'w' differ in case or Unicode form only"),
    ],
)
def test_an_unsupported_archive_is_refused_with_the_reason(
    load: Loader, files: dict[str, bytes], parameters: dict[str, str], why: str
) -> None:
    result = load(files, **parameters)
    assert isinstance(result, str)
    assert result.startswith("agent 'archive' of model 'm': ")
    assert why in result


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"file": "a"}, "parameter 'file' is not known: expected archive, config, into, strip_components, max_bytes,"),
        ({"archive": "/etc/a.tar"}, "parameter 'archive' is '/etc/a.tar': it is absolute"),
        ({"archive": "model.rar"}, "parameter 'archive' is 'model.rar', expected a name with .tar, .tar.gz"),
        ({"into": "a/../../b"}, "parameter 'into' is 'a/../../b': it climbs out"),
        ({"config": "both"}, "parameter 'config' is 'both', expected 'archive' or 'repository'"),
        ({"strip_components": "-1"}, "parameter 'strip_components' is '-1', expected a whole number from 0 on"),
        ({"max_bytes": "1 GiB"}, "parameter 'max_bytes' is '1 GiB', expected a whole number from 1 on"),
        ({"max_files": "0"}, "parameter 'max_files' is '0'"),
        ({"max_ratio": "9" * 30}, "parameter 'max_ratio' is '999"),
    ],
)
def test_an_invalid_parameter_is_refused(parameters: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Archive("m", parameters)
    assert why in caught.value.message


def test_a_directory_that_cannot_be_read_is_not_left_out(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_directories(monkeypatch, "locked")
    result = load({"m.tar": tar(items_of({"1/w": b""})), "locked/w": b""})
    assert isinstance(result, str)
    assert result.endswith("'m.tar' cannot be unpacked: Permission denied")
