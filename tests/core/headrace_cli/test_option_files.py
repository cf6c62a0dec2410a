"""Flags in a file: ``@server.flags``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import ConfigError
from headrace_cli.option_files import with_files
from headrace_cli.serve import Serve


def test_each_line_is_a_word_and_comments_are_none(tmp_path: Path) -> None:
    path = tmp_path / "server.flags"
    path.write_text("# of this machine\n--id=a b \n\n  --http-port\n8000\n--dev\r\n")
    words = ["-x", "--id=a b", "--http-port", "8000", "--dev", "y"]
    assert with_files(["-x", f"@{path}", "y"]) == words
    assert Serve().parse(["-x", f"@{path}", "y"]).words == words
    assert with_files(["--id=@x", "--id", "a@b"]) == ["--id=@x", "--id", "a@b"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "it is no text in UTF-8"),
        (b"@other", "line 1: a file of flags names no other one"),
        (b"--id=" + b"x" * (1 << 20), "have 1048581 bytes; the limit is 1048576"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(
    tmp_path: Path, content: bytes | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.flags"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        with_files([f"@{path}"])
    assert str(path) in caught.value.message
    with pytest.raises(SystemExit) as left:
        Serve().parse([f"@{path}"])
    assert left.value.code == 1
    assert reason in capsys.readouterr().err


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="cannot be read"):
        with_files([f"@{tmp_path / 'fifo'}"])


def test_a_command_line_is_checked_without_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the rules of a start, but without the environment of the user who checks it."""
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    path = tmp_path / "server.flags"
    path.write_text("--model-repository=models\n--workers=2\n")
    options = Serve().check([f"@{path}", "--http-port=9"])
    assert (options.model_repository, options.workers, options.http_port) == (("models",), 2, 9)
    assert options.allow_http
    with pytest.raises(SystemExit, match="1"):
        Serve().check([f"@{path}", "--http-prot=9"])
    assert capsys.readouterr().err.endswith("unrecognized option '--http-prot'; did you mean '--http-port'?\n")
