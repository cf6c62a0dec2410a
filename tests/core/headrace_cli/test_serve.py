"""``headrace serve`` as a process: start, signals, exit codes, log (docs/spec/behaviours.md sections 5.11 and 8)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.free_ports import free_port

Start = Callable[..., Any]

#: The last thing in the log before the endpoints start.
OPTIONS = r"exit_timeout"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_order(serve: Start, number: int) -> None:
    server = serve()
    server.wait_for(OPTIONS)
    server.signal(number)
    code, log = server.finish()
    assert code == 0
    assert "successfully unloaded 'echo' version 1" in log


def test_repeated_signals_change_nothing(serve: Start) -> None:
    server = serve()
    server.wait_for(OPTIONS)
    while server.popen.poll() is None:  # also while the interpreter exits
        server.signal(signal.SIGTERM)
        threading.Event().wait(0.0005)
    code, log = server.finish()
    assert code == 0
    assert log.count("stopping") == 1


def test_the_log_lists_models_backends_and_options_as_triton_does(serve: Start) -> None:
    server = serve("--id=weir", "--exit-timeout-secs=7")
    server.wait_for("cache_enabled")
    log = "".join(server.seen)
    assert re.search(r"^\| Backend +\| Path +\| Config +\|$", log, re.MULTILINE)
    assert re.search(r'^\| identity +\| /.*identity\.py +\| {"auto-complete-config": "true"} +\|$', log, re.MULTILINE)
    assert re.search(r"^\| echo +\| 1 +\| READY +\|$", log, re.MULTILINE)
    for key, value in {"server_id": "weir", "model_control_mode": "MODE_NONE", "exit_timeout": "7"}.items():
        assert re.search(rf"^\| {key} +\| {value} +\|$", log, re.MULTILINE)
    assert "successfully loaded 'echo'" in log


def test_endpoints_start_in_tritons_order_after_the_models(serve: Start) -> None:
    server = serve()
    for text in ("successfully loaded 'echo'", "Started GRPCInferenceService at", "Started HTTPService at",
                 "Started Metrics Service at"):  # fmt: skip
        server.wait_for(text)


def test_a_flag_opens_the_ports_after_the_models(serve: Start) -> None:
    server = serve("--listen-while-loading=false")
    server.wait_for("Started Metrics Service at")
    log = "".join(server.seen)
    assert "listens at" not in log  # the line of a port that is open before the models are loaded
    assert log.index("successfully loaded 'echo'") < log.index("Started GRPCInferenceService at")


def test_a_model_without_a_backend_is_logged_and_served(
    serve: Start, repository: Path, distribute: Callable[[str, str], None]
) -> None:
    distribute(
        "forward",
        "import headrace\n"
        "class Forward(headrace.FullScheduler):\n"
        "    name, needs_instances = 'forward', False\n"
        "    def next(self, instance, now_ns): raise AssertionError('there are no instances')\n"
        "@headrace.hookimpl\n"
        "def register_schedulers(): return [Forward]\n",
    )
    (repository / "alone" / "1").mkdir(parents=True)
    config = (repository / "echo/config.pbtxt").read_text().replace('backend: "identity"', "")
    (repository / "alone/config.pbtxt").write_text(
        config + 'parameters { key: "scheduler" value { string_value: "forward" } }'
    )
    server = serve()
    server.wait_for("Started Metrics Service at")
    assert re.search(r"^\| alone +\| 1 +\| READY +\|$", "".join(server.seen), re.MULTILINE)


def test_without_a_repository_the_text_is_tritons(headrace: Start) -> None:
    code, text = headrace("serve").finish()
    assert code == 1
    assert text.startswith("Usage: headrace serve")
    assert text.endswith("\n--model-repository must be specified\n")


def test_a_bad_option_exits_with_1_and_the_text_last(serve: Start) -> None:
    code, text = serve("--allow-http=maybe").finish()
    assert code == 1
    assert '\nBad option: "--allow-http".\ninvalid value for bool option: maybe\n\n  --allow-http=<bool>\n' in text
    assert text.endswith("        <bool> is true, on, 1, false, off or 0.\n")


def test_a_model_that_fails_stops_the_start_with_tritons_text(serve: Start, repository: Path) -> None:
    (repository / "echo" / "config.pbtxt").write_text('backend: "nowhere"')
    code, text = serve().finish()
    assert code == 1
    assert "error: creating server: Internal - failed to load all models" in text
    assert re.search(r"^\| echo +\| .*\| UNAVAILABLE: ", text, re.MULTILINE)


def test_a_model_that_fails_is_left_out_when_asked(serve: Start, repository: Path) -> None:
    (repository / "broken").mkdir()
    server = serve("--exit-on-error=false")
    server.wait_for(OPTIONS)
    server.signal(signal.SIGTERM)
    code, text = server.finish()
    assert code == 0
    assert re.search(r"^\| echo +\| 1 +\| READY +\|$", text, re.MULTILINE)


def test_a_repository_that_is_no_directory_stops_the_start(headrace: Start) -> None:
    ports = (f"--{name}-port=0" for name in ("http", "grpc", "metrics"))
    code, text = headrace("serve", "--model-repository=/nowhere", *ports).finish()
    assert code == 1
    assert "error: creating server: " in text
    assert "repository path is not a valid directory" in text


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_a_port_in_use_stops_the_start_and_is_named(serve: Start, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = serve(f"{flag}={port}").finish()
    assert code == 1
    assert re.search(rf"error: creating server: Unavailable - .*127\.0\.0\.1:{port}.* in use", text)


SLOW = """
import pathlib, time
from headrace import Backend, Instance, hookimpl

class Slow(Backend):
    name = "slow"
    def load(self, model):
        return Waiting(model.path / "go")

class Waiting(Instance):
    def __init__(self, path):
        self.path = path
    def execute(self, inputs):
        print("executing", flush=True)
        while not self.path.exists():
            time.sleep(0.01)
        return {"OUTPUT0": inputs["INPUT0"]}

@hookimpl
def register_backends():
    return [Slow]
"""
REQUEST = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]}


def ask(port: str) -> tuple[int, Any]:
    """One inference over HTTP: status and body."""
    connection = HTTPConnection("127.0.0.1", int(port), timeout=30)
    try:
        connection.request("POST", "/v2/models/echo/infer", json.dumps(REQUEST))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.fixture
def slow(serve: Start, repository: Path, distribute: Callable[[str, str], None]) -> Callable[..., Any]:
    """Starts a server whose one model answers only when a file ``go`` appears; a request is in flight."""
    distribute("slow", SLOW)
    config = repository / "echo" / "config.pbtxt"
    config.write_text(config.read_text().replace("identity", "slow"))

    def start(pool: ThreadPoolExecutor, *words: str) -> tuple[Any, Future[tuple[int, Any]]]:
        server = serve(*words)
        port = server.wait_for(r"Started HTTPService at 127\.0\.0\.1:(\d+)")[1]
        answer = pool.submit(ask, port)
        assert server.popen.stdout.readline() == "executing\n"
        return server, answer

    return start


def test_a_request_in_flight_is_answered_before_the_exit(slow: Start, repository: Path) -> None:
    with ThreadPoolExecutor() as pool:
        server, answer = slow(pool)
        server.signal(signal.SIGTERM)
        server.wait_for("stopping")
        (repository / "echo" / "1" / "go").touch()
        status, body = answer.result(30)
        assert (status, body["outputs"][0]["data"]) == (200, [1.0, 2.0, 3.0, 4.0])
        assert server.finish()[0] == 0


def test_a_request_that_does_not_end_costs_the_exit_timeout_and_code_1(slow: Start) -> None:
    with ThreadPoolExecutor() as pool:
        server, answer = slow(pool, "--exit-timeout-secs=1")
        server.signal(signal.SIGTERM)
        code, log = server.finish()
        assert code == 1
        assert "Exit timeout expired. Exiting immediately." in log
        status, body = answer.result(30)
        assert status == 503
        assert "Server is stopping" in body["error"]


def test_flags_without_effect_are_logged_in_one_line_each(serve: Start) -> None:
    server = serve("--http-thread-count=3", "--strict-model-config=false")
    server.wait_for(OPTIONS)
    log = "".join(server.seen)
    assert len(re.findall(r"^W.*--http-thread-count has no effect: ", log, re.MULTILINE)) == 1
    assert len(re.findall(r"^W.*Warning: '--strict-model-config' has been deprecated! ", log, re.MULTILINE)) == 1


def test_a_json_log_is_json_from_the_first_line_to_the_last(serve: Start) -> None:
    server = serve("--log-format=json", "--http-thread-count=3")
    server.wait_for(OPTIONS)
    server.signal(signal.SIGTERM)
    _, log = server.finish()
    messages = [json.loads(line)["message"] for line in log.splitlines()]
    assert "signal SIGTERM: stopping" in messages


def test_the_log_is_written_to_the_file_and_the_reason_of_the_exit_to_stderr_too(
    serve: Start, repository: Path, tmp_path: Path
) -> None:
    (repository / "echo" / "config.pbtxt").write_text('backend: "nowhere"')
    code, text = serve(f"--log-file={tmp_path / 'log'}").finish()
    assert code == 1
    assert text == "error: creating server: Internal - failed to load all models\n"
    assert "failed to load 'echo'" in (tmp_path / "log").read_text()


def test_a_log_file_that_cannot_be_opened_is_a_bad_option(serve: Start, tmp_path: Path) -> None:
    code, text = serve(f"--log-file={tmp_path}").finish()
    assert code == 1
    assert f"Bad option: \"--log-file\".\n[Errno 21] Is a directory: '{tmp_path}'" in text


def test_no_secret_of_the_command_line_reaches_the_log(serve: Start) -> None:
    server = serve("--http-restricted-api=logging:key=canary", "--grpc-restricted-protocol=logging:key=canary",
                   "--log-verbose=9")  # fmt: skip
    server.wait_for(OPTIONS)
    server.signal(signal.SIGTERM)
    _, log = server.finish()
    assert "canary" not in log


def test_help_exits_with_0_and_everything_else_unknown_with_1(headrace: Start) -> None:
    for words, code in ((["serve", "--help"], 0), (["--help"], 0), (["--version"], 0), ([], 1), (["serv"], 1)):
        assert headrace(*words).finish()[0] == code


def test_an_unknown_command_gets_the_nearest_one(headrace: Start) -> None:
    assert "did you mean 'serve'?" in headrace("serv").finish()[1]


PRINTING = """
from headrace import hookimpl

@hookimpl
def server_started(server):
    print("ready", flush=False)
"""


@pytest.mark.parametrize(
    "full", [("stdout",), ("stderr",), ("stdout", "stderr"), ("log",), ("log", "stdout", "stderr")]
)
def test_a_full_disk_under_log_or_output_changes_no_exit_code(
    repository: Path,
    distribute: Callable[[str, str], None],
    tmp_path: Path,
    wait_until: Callable[..., None],
    full: str,
) -> None:
    distribute("printing", PRINTING)
    port = free_port()
    log = Path("/dev/full") if "log" in full else tmp_path / "log"
    local = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--grpc-port=0", "--metrics-port=0"]
    words = [f"--model-repository={repository}", *local, f"--http-port={port}", f"--log-file={log}"]
    with (
        Path("/dev/full").open("w") as no_space,
        subprocess.Popen(
            [sys.executable, "-m", "headrace_cli", "serve", *words],
            stdout=no_space if "stdout" in full else subprocess.DEVNULL,
            stderr=no_space if "stderr" in full else subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # printed text may still be in the buffer at the end
        ) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_ready(port), "the server is ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()
