"""headrace-service, judged by systemd's own programs, which run without systemd as process 1.

`systemd-analyze` reads the units, and `systemd-socket-activate` hands over the ports.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace_cli import main
from headrace_service.notifications import watchdog_s
from headrace_testing import CommandConformance
from headrace_testing.free_ports import free_port

if TYPE_CHECKING:
    from tests.conftest import Headrace

MODELS = ("--", "--model-repository=/srv/models")
HEADRACE = Path(sys.executable).with_name("headrace")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


class TestServiceCommand(CommandConformance):
    plugin, command = "headrace_service", "service"
    good, bad = ("print", "--", "--model-repository=models"), ("start",)


def printed(*words: str) -> str:
    text = StringIO()
    with redirect_stdout(text):
        assert main(["service", *words]) == 0
    return text.getvalue()


@needs_systemd
@pytest.mark.parametrize("options", [[], ["--gpu", "--user=root", "--watchdog=0"], ["--socket"]])
def test_systemd_accepts_the_units_without_warnings(tmp_path: Path, options: list[str]) -> None:
    flags = ["--", "--model-repository=/srv/my models", "--exit-timeout-secs=5"]
    kind = "socket" if "--socket" in options else "service"
    (tmp_path / "headrace.service").write_text(printed("print", *flags))
    (tmp_path / f"headrace.{kind}").write_text(printed("print", *options, *flags))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / f"headrace.{kind}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, [line for line in done.stderr.splitlines() if "headrace" in line]) == (0, [])


@needs_systemd
def test_the_service_is_confined(tmp_path: Path) -> None:
    """`systemd-analyze security` rates units from 0.0, confined, to 9.6, which is what a unit without settings has."""
    (tmp_path / "headrace.service").write_text(printed("print", *MODELS))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", tmp_path / "headrace.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]


def test_a_unit_has_the_command_line_and_its_times() -> None:
    text = printed("print", "--", "--model-repository=/srv/100% my $models", "--exit-timeout-secs=5")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert shlex.split(command.replace("%%", "%").replace("$$", "$")) == [
        str(HEADRACE), "serve", "--model-repository=/srv/100% my $models", "--exit-timeout-secs=5"
    ]  # fmt: skip
    assert "\nTimeoutStopSec=15\n" in text
    assert "WatchdogSec" not in printed("print", *MODELS, "--workers=auto"), "systemd takes it from the supervisor only"


@pytest.mark.parametrize("flags", [["--model-repository=models"], ["--model-repository", "models"]])
def test_a_repository_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall("^ExecStart=(.*)$", printed("print", "--", *flags), re.MULTILINE)
    assert re.split("[ =]", command)[-2:] == ["--model-repository", str(tmp_path / "models")]
    assert " --model-store=s3://models/production\n" in printed("print", "--", "--model-store=s3://models/production")


@pytest.mark.parametrize(
    ("options", "flags", "why"),
    [
        (["--watchdog=-5"], [], "argument --watchdog: '-5' is no whole number from 0 to"),
        (["--user=a b"], [], "argument --user: 'a b' is no name of a user"),
        (["--user=a\nExecStartPre=/x"], [], r"is no name of a user"),
        ([], ["--id=a\nExecStartPre=/x"], "the flag '--id=a\\nExecStartPre=/x' has a character that no unit can have"),
        ([], ["--help"], "a unit starts a server: '--help' is not one of its flags"),
        (["--socket"], ["--http-port=0"], "--http-port=0: a unit for sockets needs a number from 1 to 65535"),
    ],
)
def test_flags_that_a_unit_cannot_have_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], flags: list[str], why: str
) -> None:
    code = main_code("service", "print", *options, *MODELS, *flags)
    captured = capsys.readouterr()
    assert (code, captured.out) == (1, "")
    assert why in captured.err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model-repository=models", "--http-prot=8000"],
        ["--model-repository=models", "--http-port=99999"],
        ["--model-repository=models", "--otel-logs=5"],
        ["--model-repository=models", "--metrics-config=native_histograms=5"],
        ["@not-there"],
    ],
)
def test_a_flag_is_refused_with_the_error_of_the_server(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main_code("serve", *flags) == 1
    of_server = capsys.readouterr().err
    for options in ([], ["--socket"]):
        assert main_code("service", "print", *options, "--", *flags) == 1
        assert capsys.readouterr() == ("", of_server)
    assert of_server.startswith("Usage: headrace serve")


def main_code(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as error:
        return int(str(error.code))


def test_flags_in_a_file_apply_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.flags").write_text("--model-repository=/srv/models\n--exit-timeout-secs=5\n")
    text = printed("print", "--", "@server.flags")
    assert f" serve @{tmp_path / 'server.flags'}\n" in text
    assert "\nTimeoutStopSec=15\n" in text


def test_systemd_opens_only_ports_of_the_server() -> None:
    text = printed("print", "--socket", *MODELS, "--allow-grpc=false", "--allow-metrics=0")
    assert re.findall("^ListenStream=(.*)$", text, re.MULTILINE) == ["0.0.0.0:8000"]


@contextmanager
def manager(path: Path) -> Iterator[socket.socket]:
    """Receives the datagrams of a service as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(30)
        yield receiver


def test_systemd_is_notified_of_ready_watchdog_and_stopping(
    keep_serving: Callable[..., Headrace], tmp_path: Path
) -> None:
    (tmp_path / "models/echo/1").mkdir(parents=True)
    (tmp_path / "models/echo/config.pbtxt").write_text('backend: "identity"')
    with manager(tmp_path / "notify") as receiver:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        server = keep_serving(f"--model-repository={tmp_path / 'models'}", environ=environ)
        assert receiver.recv(999) == b"READY=1\nSTATUS=serving 1 models"
        assert [receiver.recv(999) for _ in range(4)] == [b"WATCHDOG=1"] * 4
        server.process.send_signal(signal.SIGTERM)
        while (datagram := receiver.recv(999)) == b"WATCHDOG=1":
            pass
        assert datagram == b"STOPPING=1\nSTATUS=stopping"
        assert server.process.wait(10) == 0


def test_the_watchdog_of_another_process_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert watchdog_s() == 3
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_s() == 3
    monkeypatch.setenv("WATCHDOG_PID", str(os.getppid()))
    assert watchdog_s() == 0


def test_a_missing_notify_socket_is_ignored(keep_serving: Callable[..., Headrace], tmp_path: Path) -> None:
    server = keep_serving(f"--model-repository={tmp_path}", environ={"NOTIFY_SOCKET": str(tmp_path / "gone")})
    server.wait_for_line("systemd does not take")
    assert server.get("/v2/health/ready")[0] == 200


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd is not installed")
def test_a_server_takes_the_ports_on_which_systemd_listens(tmp_path: Path) -> None:
    """It is started by the first request, which waits until it is ready."""
    ports = free_port(), free_port()
    listens = [f"--listen=127.0.0.1:{port}" for port in ports]
    flags = [f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", "--allow-metrics=false"]
    command = ["systemd-socket-activate", *listens, str(HEADRACE), "serve", f"--model-repository={tmp_path}", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for _ in ports:
                assert "Listening on" in server.stderr.readline()
            client = http.client.HTTPConnection("127.0.0.1", ports[0], timeout=30)
            client.request("GET", "/v2/health/live")
            assert client.getresponse().status == 200
            client.close()
            seen = iter(server.stderr)
            assert "Communication attempt" in next(seen), "the request started it"
            ready = next(line for line in seen if "Started GRPC" in line)
            assert ready.endswith(f'0.0.0.0:{ports[1]}"\n')
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()
