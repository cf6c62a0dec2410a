"""Asking a server why its batches ran: over both HTTP hosts, by the command line, and from Python."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace import NotFound, Server
from headrace_cli import main

if TYPE_CHECKING:
    from tests.conftest import Headrace

FIELDS = {"age_us", "instance", "reason", "requests", "rows", "first_wait_us", "last_wait_us", "waiting"}


@pytest.fixture(params=["server", "hypercorn"])
def asked(request: pytest.FixtureRequest, connect: Callable[..., Any]) -> Headrace:
    """A server that has just run three rows of ``batched`` in one request."""
    server: Headrace = request.getfixturevalue(request.param)
    connect("http", server).echo("batched", np.ones((3, 4), np.float32), "FP32")
    return server


def test_both_hosts_show_the_last_batches(asked: Headrace) -> None:
    for version in ("", "/versions/1"):
        status, body = asked.get(f"/v2/models/batched{version}/explain")
        document = json.loads(body)
        assert status == 200
        assert (document["name"], document["version"], document["scheduler"]) == ("batched", "1", "dynamic_batching")
        last = document["batches"][-1]
        assert set(last) == FIELDS
        assert [last[key] for key in ("reason", "requests", "rows", "instance")] == ["idle_instance", 1, 3, "batched_0"]
        assert sum(document["reasons"].values()) == len(document["batches"])


@pytest.mark.parametrize(("path", "reason"), [("nobody", "'nobody' is not found"), ("batched/versions/7", "version 7")])
def test_unknown_model_is_not_found(asked: Headrace, path: str, reason: str) -> None:
    status, body = asked.get(f"/v2/models/{path}/explain")
    assert status == 404
    assert reason in json.loads(body)["error"]


def test_the_command_draws_the_document_of_the_server(asked: Headrace, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"--url=http://127.0.0.1:{asked.http}"
    assert main(["explain", "batched", url]) == 0
    shown = capsys.readouterr().out
    # It decides during execution where its short executions run.
    drawn = shown.replace(", 1 of them on the event loop", "", 1)
    assert drawn.startswith("batched version 1: scheduler dynamic_batching, 1 instances, at most 8 rows in a batch")
    assert re.search(r"^  idle_instance +\d+ +\d+\.\d %  #+$", shown, re.MULTILINE)
    assert re.search(r"^\| [\d.]+ +\| batched_0 +\| idle_instance +\| 1 +\| 3 ", shown, re.MULTILINE)
    assert main(["explain", "batched", url, "--version=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"][-1]["rows"] == 3


def test_a_model_that_has_run_nothing_has_nothing_to_show(server: Headrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "versions", f"--url=http://127.0.0.1:{server.http}"]) == 0
    assert capsys.readouterr().out.startswith("versions version 3: scheduler direct, 1 instances")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nobody"], r"answers 404: Request for unknown model: 'nobody' is not found"),
        (["../../v2", "--url={url}"], r"answers 404: Request for unknown model: '\.\.%2F\.\.%2Fv2' is not found"),
        (["batched", "--url=file:///etc"], r"cannot ask file:///etc about 'batched': the address must begin with http"),
        (
            ["batched", "--url=http://127.0.0.1:{closed}"],
            r"cannot ask http://127\.0\.0\.1:\d+ about 'batched': .*refuse",
        ),
        (
            ["batched", "--url=http://127.0.0.1:{grpc}"],
            r"about 'batched': the server on that port does not speak HTTP/1\.1; gRPC and HTTP have different ports",
        ),
    ],
)
def test_impossible_request_is_one_line(
    server: Headrace, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url, closed = f"http://127.0.0.1:{server.http}", unheard.getsockname()[1]
        arguments = [word.format(url=url, closed=closed, grpc=server.grpc) for word in words]
        arguments += [] if any(word.startswith("--url") for word in words) else [f"--url={url}"]
        assert main(["explain", *arguments]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert re.search(why, output.err)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_fault_of_the_server(server: Headrace, words: list[str]) -> None:
    """As in ``headrace explain | head``."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "headrace_cli", "explain", "batched", f"--url=http://127.0.0.1:{server.http}"]
    with os.fdopen(write, "w") as unread:
        # Unbuffered, so that output reaches the closed pipe at once, as a long answer does.
        process = subprocess.run(
            [*command, *words],
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("--last=-1", "argument --last: '-1' is no number of batches: expected a whole number from 0 on"),
        ("--last=x", "argument --last: 'x' is no number of batches: expected a whole number from 0 on"),
        ("--version=x", "argument --version: 'x' is no version: expected a whole number"),
        ("--header=secret", "argument --header: expected NAME:VALUE"),
    ],
)
def test_invalid_arguments_are_refused(capsys: pytest.CaptureFixture[str], word: str, why: str) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["explain", "m", word])
    assert capsys.readouterr().err.splitlines()[-1] == why


def test_last_0_shows_no_batch(asked: Headrace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "batched", f"--url=http://127.0.0.1:{asked.http}", "--last=0"]) == 0
    shown = capsys.readouterr().out
    assert "The request of a batch that waited longest" in shown
    assert "|" not in shown


def test_a_program_asks_its_own_server(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "identity" max_batch_size: 4 {tensors}')
    with Server(tmp_path) as server:
        server.infer("m", {"x": np.ones((2, 1), np.float32)})
        assert [batch["rows"] for batch in server.explain("m", "1")["batches"]] == [2]
        with pytest.raises(NotFound, match="'n' is not found"):
            server.explain("n")
