"""Every flag with every kind of bad value: it is taken, or refused in one line, and never ends in a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError, HeadraceError
from headrace.server import Server
from headrace.telemetry.logs import Log, LogSettings
from headrace_cli import command_line
from headrace_cli.flags import FLAGS
from headrace_cli.serve import find_plugins

if TYPE_CHECKING:
    from tests.core.headrace_cli.conftest import Process

#: Python gives a program bytes that are not UTF-8 as such a character.
NOT_UTF8 = "\udcff"
VALUES = ("", "-1", "1e9", "x", "a:b:c", "0.0.1", "1" * 31, "-" + "9" * 40, NOT_UTF8, "é", "٣", "(", "[::1]", ":", ",",
          "=", "a,b=c", "level=x", "rate=-1", "local,size=x", "5-1", "*", "nan", "x" * 300)  # fmt: skip
#: Processes, which are not to be started once for each value.
OF_OTHER_PROCESSES = {"workers"}
PORTS = [f"--{port}-{what}" for port in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag not in OF_OTHER_PROCESSES])
def test_a_bad_value_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.chdir(tmp_path)  # a log file may be made
    groups = list(find_plugins([]).options)

    async def try_all() -> None:
        for value in VALUES:
            # Every refusal has one of these forms. Anything else is a traceback.
            with contextlib.suppress(ConfigError):
                words = [f"--model-repository={tmp_path}", *PORTS, f"--{flag}={value}"]
                options, _ = command_line.read_options(words, {}, groups)
                await serve_for_a_moment(options)

    asyncio.run(try_all())


async def serve_for_a_moment(options: ServerOptions) -> None:
    with contextlib.suppress(OSError):  # as the command line refuses it
        Log(LogSettings.from_options(options)).close()
    server = Server(options)
    try:
        with contextlib.suppress(HeadraceError):
            await server.start_frontends()
            await server.start()
    finally:
        with contextlib.suppress(HeadraceError):
            await server.stop()


@pytest.mark.parametrize("flag", sorted(OF_OTHER_PROCESSES))
@pytest.mark.parametrize("value", VALUES)
def test_a_number_of_processes_is_read_or_refused(flag: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        command_line.read_options(["--model-repository=x", f"--{flag}={value}"], {}, [])


def test_a_server_that_cannot_be_created_is_one_line_of_the_log(
    serve: Callable[..., Process], distribute: Callable[[str, str], None]
) -> None:
    distribute(
        "strict",
        "import headrace\n"
        "class Strict(headrace.Interceptor):\n"
        "    name = 'strict'\n"
        "    def admit(self, caller, operation, model): return None\n"
        "    def __init__(self, options): raise headrace.ConfigError('no licence')\n"
        "@headrace.hookimpl\n"
        "def register_interceptors(): return [Strict]\n",
    )
    code, text = serve().finish()
    assert code == 1
    assert text.rstrip().endswith('"error: creating server: Invalid argument - no licence"')
    assert "Traceback" not in text


def test_a_used_port_of_the_metrics_is_not_reported_as_that_of_http(serve: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = serve("--metrics-address=127.0.0.1", f"--metrics-port={port}").finish()
    assert code == 1
    assert f"failed to listen for Metrics Service on 127.0.0.1:{port}: the port is in use" in text


def test_a_name_of_the_server_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'Bad option: "--id"\.\nInvalid option value: not UTF-8\. Got \\udcff'):
        command_line.read_options(["--model-repository=x", f"--id={NOT_UTF8}"], {}, [])
