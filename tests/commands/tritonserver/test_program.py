"""The program as scripts use it: start, wait, request, stop (docs/spec/behaviours.md section 8)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import IO

import pytest

from headrace_testing.free_ports import free_port

PROGRAM = Path(sys.executable).with_name("tritonserver")
CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [2] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] }
"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]})
#: A backend whose load waits until the file that an environment variable names exists.
WAITS = """
import os, pathlib, threading
from headrace import Backend, Instance, hookimpl

class Waits(Backend):
    name = "waits"

    def load(self, model):
        gate = pathlib.Path(os.environ["WAITS_FOR"])
        while not gate.exists():
            threading.Event().wait(0.02)
        return Passes()

class Passes(Instance):
    def execute(self, tensors):
        return {"OUTPUT0": tensors["INPUT0"]}

@hookimpl
def register_backends():
    return [Waits]
"""
DEADLINE_S = 60


#: Runs a program as process 1 of a namespace, as a container does.
CONTAINED = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


class Program:
    """A running ``tritonserver`` with stderr in a file. ``under`` is the command that starts it."""

    def __init__(self, log: Path, *words: str, under: Sequence[str] = ()) -> None:
        self.log, self.ports = log, [free_port() for _ in range(3)]
        named = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), self.ports, strict=True)]
        self._file: IO[bytes] = log.open("wb")
        self.popen = subprocess.Popen([*under, str(PROGRAM), *named, *words], stderr=self._file, stdout=self._file)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        """Wait until ``pattern`` is in the log."""
        until(lambda: re.search(pattern, self.text()) or self.popen.poll() is not None)
        assert re.search(pattern, self.text()), self.text()

    def listens(self) -> list[bool]:
        return [is_open(port) for port in self.ports]

    def finish(self) -> int:
        return self.popen.wait(DEADLINE_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._file.close()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def ask(port: int, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models/echo/1").mkdir(parents=True)
    (tmp_path / "models/echo/config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def run(*words: str, under: Sequence[str] = ()) -> Program:
        started.append(Program(tmp_path / f"log{len(started)}", *words, under=under))
        return started[-1]

    yield run
    for program in started:
        program.close()


@pytest.fixture
def gate(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that loads as soon as this file exists."""
    site, gate = tmp_path / "site", tmp_path / "gate"
    info = site / "headrace_waits-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "plugin_waits.py").write_text(WAITS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-waits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\nwaits = plugin_waits\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (repository / "late/1").mkdir(parents=True)
    (repository / "late/config.pbtxt").write_text(CONFIG.replace("identity", "waits"))
    monkeypatch.setenv("WAITS_FOR", str(gate))
    return gate


SCRIPT = """
set -e
"$1" --model-repository="$2" --http-port=$3 --grpc-port=$4 --metrics-port=$5 --model-control-mode=poll \\
  --repository-poll-secs=30 --strict-model-config=false --log-verbose=1 2>"$6" &
server=$!
until curl -sf localhost:$3/v2/health/ready; do sleep 0.1; done
curl -sf localhost:$3/v2/health/live
curl -sf -d "$7" localhost:$3/v2/models/echo/infer
echo
curl -sf localhost:$5/metrics | grep -c '^nv_inference_request_success{model="echo",version="1"} 1'
kill $server
wait $server
echo "ended with $?"
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="the script calls curl")
def test_a_common_script_runs_unchanged(repository: Path, tmp_path: Path) -> None:
    words = [str(PROGRAM), str(repository), *[str(free_port()) for _ in range(3)], str(tmp_path / "log"), BODY]
    done = subprocess.run(["sh", "-c", SCRIPT, "sh", *words], capture_output=True, text=True, timeout=DEADLINE_S,
                          check=False)  # fmt: skip
    answer, count, end = done.stdout.splitlines()
    assert json.loads(answer)["outputs"][0]["data"] == [1, 2]
    assert (count, end) == ("1", "ended with 0")
    log = (tmp_path / "log").read_text()
    for text in ("successfully loaded 'echo'", "Started GRPCInferenceService at 0.0.0.0:",
                 "Started HTTPService at 0.0.0.0:", "Started Metrics Service at 0.0.0.0:", "MODE_POLL",
                 "'--strict-model-config' has been deprecated!"):  # fmt: skip
        assert text in log


def test_the_ports_open_when_the_models_are_loaded(start: Callable[..., Program], repository: Path, gate: Path) -> None:
    program = start(f"--model-repository={repository}")
    program.wait_for("successfully loaded 'echo'")
    program.wait_for("loading: late:1")
    assert program.listens() == [False, False, False]
    gate.touch()
    program.wait_for("Started Metrics Service at")
    assert program.listens() == [True, True, True]
    # A script that has waited for live sends a request at once.
    assert ask(program.ports[0], "/v2/health/live")[0] == 200
    assert ask(program.ports[0], "/v2/models/late/infer", BODY)[0] == 200
    program.popen.send_signal(signal.SIGTERM)
    assert program.finish() == 0


def test_a_flag_opens_the_ports_before_the_loads(start: Callable[..., Program], repository: Path, gate: Path) -> None:
    program = start(f"--model-repository={repository}", "--listen-while-loading=true")
    program.wait_for("loading: late:1")
    assert program.listens() == [True, True, True]
    assert [ask(program.ports[0], f"/v2/health/{probe}")[0] for probe in ("live", "ready")] == [200, 400]
    gate.touch()
    program.wait_for("Started Metrics Service at")


def test_a_signal_during_loads_ends_the_program(start: Callable[..., Program], repository: Path, gate: Path) -> None:
    program = start(f"--model-repository={repository}")
    program.wait_for("loading: late:1")
    program.popen.send_signal(signal.SIGTERM)
    assert program.finish() == 0
    assert not gate.exists()


def test_a_failed_model_exits_1_before_the_ports_open(
    start: Callable[..., Program], repository: Path, gate: Path
) -> None:
    (repository / "echo/config.pbtxt").write_text('backend: "nowhere"')
    program = start(f"--model-repository={repository}")
    program.wait_for("failed to load 'echo'")
    assert program.listens() == [False, False, False]
    gate.touch()
    assert program.finish() == 1
    assert "error: creating server: Internal - failed to load all models" in program.text()
    assert "Started" not in program.text()
    assert "listens at" not in program.text()


def test_missing_parts_are_named_before_the_loads(start: Callable[..., Program], repository: Path) -> None:
    program = start(f"--model-repository={repository}", "--allow-sagemaker=true", "--plugins=headrace")
    assert program.finish() == 1
    assert "--allow-sagemaker is refused: it needs an extension" in program.text()
    assert "loading: echo" not in program.text()


def test_a_failed_model_may_be_left_out(start: Callable[..., Program], repository: Path) -> None:
    (repository / "broken/1").mkdir(parents=True)
    (repository / "broken/config.pbtxt").write_text('backend: "nowhere"')
    strict = start(f"--model-repository={repository}", "--exit-on-error=false", "--id=weir")
    strict.wait_for("Started HTTPService at")
    assert [ask(strict.ports[0], f"/v2/health/{probe}")[0] for probe in ("live", "ready")] == [200, 400]
    assert json.loads(ask(strict.ports[0], "/v2")[1])["name"] == "weir"
    lenient = start(f"--model-repository={repository}", "--exit-on-error=false", "--strict-readiness=false")
    lenient.wait_for("Started HTTPService at")
    assert ask(lenient.ports[0], "/v2/health/ready")[0] == 200


def test_a_port_in_use_exits_1(start: Callable[..., Program], repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = start(f"--model-repository={repository}", "--http-address=127.0.0.1", f"--http-port={port}")
        assert program.finish() == 1
    assert re.search(rf"error: creating server: Unavailable - .*127\.0\.0\.1:{port}.* in use", program.text())


def test_two_signals_end_it_once(start: Callable[..., Program], repository: Path) -> None:
    program = start(f"--model-repository={repository}")
    program.wait_for("Started HTTPService at")
    for _ in range(2):
        program.popen.send_signal(signal.SIGINT)
    assert program.finish() == 0
    assert program.text().count("successfully unloaded 'echo' version 1") == 1


def can_contain() -> bool:
    """True if this machine allows namespaces to this user."""
    try:
        return subprocess.run([*CONTAINED, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_contain(), reason="no namespaces for this user")
def test_process_1_of_a_container_ends_by_a_signal(start: Callable[..., Program], repository: Path) -> None:
    program = start(f"--model-repository={repository}", under=CONTAINED)
    program.wait_for("Started HTTPService at")
    assert re.search(r"^I\d{4} [\d:.]+ 1 ", program.text(), re.MULTILINE)  # the log has the number of the process
    parent = program.popen.pid
    child = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
    os.kill(child, signal.SIGTERM)
    assert program.finish() == 0
    assert "successfully unloaded 'echo' version 1" in program.text()


def test_two_programs_share_a_port(start: Callable[..., Program], repository: Path) -> None:
    first = start(f"--model-repository={repository}", "--reuse-http-port=true", "--id=first")
    first.wait_for("Started HTTPService at")
    second = start(
        f"--model-repository={repository}", "--reuse-http-port=1", "--id=second", f"--http-port={first.ports[0]}"
    )
    second.wait_for("Started HTTPService at")
    names: set[str] = set()

    def both_have_answered() -> bool:
        names.add(json.loads(ask(first.ports[0], "/v2")[1])["name"])
        return len(names) == 2

    until(both_have_answered)
    assert names == {"first", "second"}
