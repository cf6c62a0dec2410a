"""headrace-bundle: archives that run wherever they are unpacked, and what cannot be put into one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace import HeadraceError
from headrace_bundle.archive_files import read_archive, write_archive
from headrace_bundle.bundle_command import BundleCommand
from headrace_bundle.bundle_tree import make_tree
from headrace_bundle.bundled_models import BundledModel, read_models
from headrace_bundle.distribution_choice import choose
from headrace_bundle.progress_line import ProgressLine
from headrace_bundle.wheelhouse import TargetMachine
from headrace_bundle.write_bundle import write_bundle
from headrace_testing import CommandConformance

CONFIG = 'backend: "identity"'
PYTHON = f"3.{sys.version_info.minor}"
#: In place of the server: it prints how it was started.
PROGRAM = """
import json, sys
def main():
    print(json.dumps([sys.argv, sys.prefix, [path for path in sys.path if "site-packages" in path]]))
"""
ENTRIES = "[headrace]\nx = headrace_cli\n[console_scripts]\nheadrace = headrace_cli:main\nother = headrace_cli:main\n"


class TestBundleCommand(CommandConformance):
    plugin, command = "headrace_bundle", "bundle"
    bad = ("--model-repository=nowhere", "--output=x.tar.gz")


def call(*words: str) -> int:
    command = BundleCommand()
    return command.run(command.parse(words))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("repository")
    (models / "echo/1").mkdir(parents=True)
    (models / "echo/config.pbtxt").write_text(CONFIG)
    (models / "echo/1/weights").write_bytes(bytes(100_000))
    (models / "echo/1/link").symlink_to("weights")
    return models


@pytest.fixture(scope="module")
def archive(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a small program. `nox -s edge` tests bundles of the server."""
    folder = tmp_path_factory.mktemp("made")
    wheel = folder / "headrace-1.0-py3-none-any.whl"
    files = {
        "headrace_cli.py": PROGRAM,
        "headrace-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: headrace\nVersion: 1.0\n",
        "headrace-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "headrace-1.0.dist-info/entry_points.txt": ENTRIES,
        "headrace-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    step, target, path = ProgressLine().step, TargetMachine(PYTHON), folder / "echo.tar"
    tree = make_tree(folder / "tree", [wheel], target, step)
    write_bundle(tree, target, read_models([str(models)]), path, step)
    return path


def run(program: Path, *words: str) -> Any:
    """Return the output of the small program, run without this environment."""
    environ = {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run([program, *words], env=environ, cwd="/", capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = call("verify", str(path))
    return code, capsys.readouterr().out


def test_it_runs_where_it_is_unpacked_and_after_a_move(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "here it is", tmp_path / "and there"
    first.mkdir()
    subprocess.run(["tar", "xf", archive, "-C", first], check=True)
    for bundle in (first / "echo", second / "echo"):
        if not bundle.exists():
            first.rename(second)
        assert run(bundle / "headrace", "serve", "--http-port=1") == [
            ["headrace", "serve", f"--model-repository={bundle}/models", "--http-port=1"],
            str(bundle),
            [f"{bundle}/lib/python{PYTHON}/site-packages"],
        ]
        code, stdout = verify(bundle, capsys)
        assert code == 0, stdout
        assert stdout.endswith("models: echo\n")
    assert run(bundle / "bin/other", "serve", "--model-repository=/srv")[0] == [
        "other", "serve", "--model-repository=/srv"
    ]  # fmt: skip
    weights, module = bundle / "models/echo/1/weights", bundle / f"lib/python{PYTHON}/site-packages/headrace_cli.py"
    assert (bundle / "models/echo/1/link").read_bytes() == weights.read_bytes()
    weights.write_bytes(bytes(99_999) + b"\1")
    module.unlink()
    (bundle / "new").write_text("")
    code, stdout = verify(bundle, capsys)
    assert (code, [line.rpartition("/")[2] for line in stdout.splitlines()]) == (
        1, ["headrace_cli.py: missing", "weights: changed", "new: not in the manifest"]
    )  # fmt: skip


def test_a_changed_byte_of_the_archive_is_found(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(archive, capsys)[0] == 0
    data = bytearray(archive.read_bytes())
    with tarfile.open(archive) as opened:
        member = next(each for each in opened if each.name == "echo/models/echo/1/weights")
        data[member.offset_data + 77] ^= 1
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(data)
    assert verify(damaged, capsys) == (1, "models/echo/1/weights: changed\n")


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tar.zst"])
def test_the_same_content_is_the_same_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for path in (tmp_path / name, tmp_path / f"2{name}"):
        with path.open("wb") as file, write_archive(file, name) as archive:
            archive.addfile(tarfile.TarInfo("x/empty"))
    assert (tmp_path / name).read_bytes() == (tmp_path / f"2{name}").read_bytes()
    with read_archive(tmp_path / name) as read:
        assert [member.name for member in read] == ["x/empty"]
    written = (tmp_path / name).read_bytes()
    for damaged in (written[: len(written) // 2], b"junk", written[:12] + b"\0" * 100):
        (tmp_path / name).write_bytes(damaged)
        assert call("verify", str(tmp_path / name)) == 1
        assert f"'{tmp_path / name}' is damaged or no archive of a bundle: " in capsys.readouterr().err
    assert call("verify", str(tmp_path / "none")) == 1
    assert capsys.readouterr().err == f"'{tmp_path}/none' does not exist\n"


@pytest.mark.parametrize("python", ["none", "elsewhere"])
def test_a_machine_without_that_python_gets_an_error_that_names_it(archive: Path, tmp_path: Path, python: str) -> None:
    parts = [f"echo/{name}" for name in ("headrace", "pyvenv.cfg", "bin/headrace")]
    subprocess.run(["tar", "xf", archive, "-C", tmp_path, *parts], check=True)
    programs, version = tmp_path / "programs", f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs.mkdir()
    for name in ("dirname", "readlink", "uname", "sed", "ln"):
        (programs / name).symlink_to(shutil.which(name) or name)
    if python == "elsewhere":
        (programs / version).write_text('#!/bin/sh\necho "$0"')
        (programs / version).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "echo/bin/headrace", "plugins"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    if python == "none":
        assert done.returncode == 1
        assert f"this bundle needs Python {version[6:]}: no {version} on PATH" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, f"{tmp_path}/echo/bin/python\n")
        assert f"home = {programs}\n" in (tmp_path / "echo/pyvenv.cfg").read_text()


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # that another test of the process imported
def test_unsupported_content_is_named(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*words: str, repository: Path = models) -> str:
        assert call(f"--model-repository={repository}", *words) == 1
        return capsys.readouterr().err

    output = f"--output={tmp_path / 'x.tar'}"
    assert f"'{tmp_path / 'x.zip'}' is no name of an archive" in wrong(f"--output={tmp_path / 'x.zip'}")
    assert "'/nowhere' is no directory" in wrong("--output=/nowhere/x.tar")
    assert "has no models" in wrong(output, repository=tmp_path)
    assert "no directory of this machine" in wrong(output, repository=Path("s3://bucket"))
    assert "no plugin 'dashbord' is installed; did you mean 'dashboard'?" in wrong(output, "--plugins=dashbord")
    assert f"--requirements '{tmp_path}/r' is no file" in wrong(output, f"--requirements={tmp_path}/r", "--plugins=")
    broken = tmp_path / "models/broken"
    (broken / "1").mkdir(parents=True)
    (broken / "config.pbtxt").write_text('backend: "nope"')
    assert re.search("model 'broken'.*'nope'", wrong(output, repository=broken.parent))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["models"]


def test_files_of_a_model_that_cannot_be_moved_are_named(tmp_path: Path) -> None:
    model = BundledModel("m", tmp_path / "m", "models", "")
    (tmp_path / "m/1").mkdir(parents=True)
    for make, text in (
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file"),
        (lambda path: path.symlink_to("../1"), "is a link to a folder that it lies in"),
        (os.mkfifo, "is no regular file"),
    ):
        make(tmp_path / "m/1/x")
        with pytest.raises(HeadraceError, match=f"1/x' {text}"):
            list(model.files())
        (tmp_path / "m/1/x").unlink()
    (tmp_path / "m/1/pyvenv.cfg").write_text("")
    with pytest.raises(HeadraceError, match="1' is a virtual environment"):
        list(model.files())


def test_only_needed_engines_are_chosen() -> None:
    with_onnx = choose({"onnxruntime", "identity", ""}, None)
    assert list(with_onnx.engines) == ["headrace-onnx"]
    assert any(each.startswith("onnxruntime==") for each in with_onnx.constraints)
    assert not any(each.startswith(("torch==", "openvino==", "pytest==")) for each in with_onnx.constraints)
    core = choose({"identity"}, ())
    assert [Path(each).name for each in core.sources] in (["core"], [])


def test_wheels_of_older_systems_run_on_a_newer_one() -> None:
    words = TargetMachine("3.12", "manylinux_2_28_aarch64").pip_words()
    platforms = [word.partition("=")[2] for word in words if word.startswith("--platform")]
    assert platforms[0] == "manylinux_2_28_aarch64"
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= {*platforms}
    assert not any(each.startswith(("manylinux_2_29", "manylinux_2_16", "manylinux1_")) for each in platforms)
    assert TargetMachine(f"3.{sys.version_info.minor}").pip_words() == []
