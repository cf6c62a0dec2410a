"""A requirements.txt is installed once; real pip, wheels of our own, no network."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import LoadError
from headrace_python import program
from headrace_python.requirements import install

Wheels = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


def say(root: Path, what: str) -> str:
    answer = subprocess.run([root / "bin/python", "-c", f"import {what}"], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_requirements_and_numpy_are_installed(
    model: Path, cache: Path, wheels: Wheels, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "headrace.python")
    monkeypatch.setattr(program, "PROGRESS_S", 0.2)
    digest = wheels("colour", code="print('blue')")
    wheels("shape", code="print('round')")
    wheels("numpy", "9.9", code="print('numbers')")
    write(model / "more/shapes.txt", "shape\n-c ../limits.txt\n")
    write(model / "limits.txt", "shape==1.0\n")
    file = write(model / "requirements.txt", f"colour==1.0 --hash=sha256:{digest}\n")
    root = install(file, model)
    assert say(root, "colour") == "blue"
    assert say(root, "numpy") == "numbers"
    assert root.is_relative_to(cache)
    assert f"making the environment of '{file}'; this is done once" in caplog.messages
    assert any(message.startswith(f"still making the environment of '{file}' after ") for message in caplog.messages)
    assert f"made the environment of '{file}'" in caplog.messages

    caplog.clear()
    assert install(file, model) == root
    assert caplog.messages == []

    write(file, "-r more/shapes.txt\n")
    other = install(file, model)
    assert other != root
    assert say(other, "shape") == "round"


def test_only_the_log_has_the_output_of_pip(
    model: Path, cache: Path, wheels: Wheels, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(model / "requirements.txt", "no-such-thing==1\n")
    with pytest.raises(LoadError) as raised:
        install(file, model)
    assert raised.value.message == (
        f"the environment of '{file}' cannot be made: pip exited with status 1; its last words are in the log"
    )
    assert "No matching distribution found for no-such-thing==1" in caplog.text
    assert list((cache / "environments").iterdir()) == []


def test_a_wrong_hash_is_refused_by_pip(
    model: Path, cache: Path, wheels: Wheels, caplog: pytest.LogCaptureFixture
) -> None:
    wheels("colour")
    file = write(model / "requirements.txt", f"colour==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(LoadError, match="pip exited with status 1"):
        install(file, model)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "-r ../secret.txt",
        "-r../secret.txt",
        "--requirement ../secret.txt",
        "--requirement=../secret.txt",
        "--requirem ../secret.txt",
        "-c ../secret.txt",
        "--constraint=../secret.txt",
        "--cons ../secret.txt",
        "-r \\\n../secret.txt",
        "# a comment goes no further \\\n-r ../secret.txt",
        "--pre -r ../secret.txt",
        "--pre \\\n\\\n -r ../secret.txt",
        "  -r '../secret.txt'",
        "-r {tmp}/secret.txt",
        "-r link.txt",
        "-r inner.txt",
    ],
)
def test_an_include_outside_of_the_model_is_refused(model: Path, tmp_path: Path, cache: Path, line: str) -> None:
    write(tmp_path / "secret.txt", "password\n")
    (model / "link.txt").symlink_to(tmp_path / "secret.txt")
    write(model / "inner.txt", "-r ../secret.txt")
    file = write(model / "requirements.txt", f"colour\n{line.format(tmp=tmp_path)}\n")
    with pytest.raises(LoadError, match=r"^requirement \d+ of '.*' includes a file outside the directory '[^']*'$"):
        install(file, model)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["nothing.txt", "https://example.invalid/r.txt", "${HOME}/x"])
def test_an_include_that_is_no_file_is_refused(model: Path, name: str) -> None:
    with pytest.raises(LoadError, match=r"^requirement \d+ of .* includes a path that is no file$"):
        install(write(model / "requirements.txt", f"-r {name}\n"), model)


def test_files_that_include_each_other_are_left_to_pip_to_refuse(model: Path, cache: Path, wheels: Wheels) -> None:
    write(model / "a.txt", "-r requirements.txt\n")
    with pytest.raises(LoadError, match="cannot be made: pip exited with status"):
        install(write(model / "requirements.txt", "-r a.txt\n"), model)


def test_a_comment_includes_nothing(model: Path, cache: Path, wheels: Wheels) -> None:
    wheels("numpy", "9.9")
    file = write(model / "requirements.txt", "# -r ../comment\nnumpy # -r ../comment\n")
    assert (install(file, model) / "bin/python").exists()


def test_a_name_never_reaches_a_shell_or_an_option(tmp_path: Path, cache: Path, wheels: Wheels) -> None:
    wheels("numpy", "9.9")
    model = tmp_path / "-m;touch a$(touch b)`touch c`"
    file = write(model / "-r;touch d\n.txt", "numpy\n")
    before = {*tmp_path.iterdir()}
    assert (install(file, model) / "bin/python").exists()
    assert {*tmp_path.iterdir()} - {cache} == before
    assert not [name for name in "abcd" if Path(name).exists()]  # the files of the touch commands
    assert list(model.iterdir()) == [file]
