"""The command ``headrace service print``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace import Command, Serve, ServerOptions

_HELP = frozenset(("--help", "-h"))
#: Flags whose values are directories of models, or URLs.
_REPOSITORIES = ("--model-repository", "--model-store")


class ServiceCommand(Command):
    """Prints the systemd units that run a server with given flags."""

    name = "service"
    help = "print a systemd unit that runs a server"
    synopsis = "print [options] -- <flags of headrace serve>"
    description = (
        "Print a unit of systemd: ready when the models are loaded, restarted if the server ends or hangs, "
        "without rights that a server does not need."
    )
    example = "headrace service print -- --model-repository=/srv/models > /etc/systemd/system/headrace.service"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("print",), metavar="print", help="print the unit on stdout")
        parser.add_argument(
            "--socket",
            action="store_true",
            help="print headrace.socket: systemd listens and starts the server at the first connection",
        )
        parser.add_argument(
            "--user", type=_user, default="", help="the user of the server; default: a dynamic user of systemd"
        )
        parser.add_argument("--gpu", action="store_true", help="allow GPU devices")
        parser.add_argument(
            "--watchdog",
            type=_from(0),
            default=30,
            metavar="SECONDS",
            help="restart after a hang; 0: never; default: 30",
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments. What follows ``--`` is ``flags``, which `headrace serve` reads when the unit starts."""
        own = list(words[: words.index("--")] if "--" in words else words)
        arguments = super().parse(own)
        arguments.flags = list(words[len(own) + 1 :])
        return arguments

    def run(self, arguments: argparse.Namespace) -> int:
        from headrace_service.units import ServerUnit, render_service

        if wrong := [word for word in arguments.flags if not word.isprintable()]:
            print(f"the flag {wrong[0]!r} has a character that no unit can have", file=sys.stderr)
            return 1
        if not _HELP.isdisjoint(arguments.flags):
            print("a unit starts a server: '--help' is not one of its flags", file=sys.stderr)
            return 1
        options = Serve().check(arguments.flags)
        if arguments.socket:
            return _print_sockets(options)
        words = (str(Path(sys.executable).with_name("headrace")), "serve", *_with_whole_paths(arguments.flags))
        service = ServerUnit(
            words,
            user=arguments.user,
            uses_gpu=arguments.gpu,
            exit_timeout_s=options.exit_timeout_secs,
            watchdog_s=0 if options.workers else arguments.watchdog,
            has_workers=bool(options.workers),
        )
        print(render_service(service), end="")
        return 0


def _print_sockets(options: ServerOptions) -> int:
    """Print the unit of the ports that ``options`` open. Return the exit code."""
    from headrace_service.units import render_sockets

    ports = {
        "http": (options.allow_http, options.http_address, options.http_port),
        "grpc": (options.allow_grpc, options.grpc_address, options.grpc_port),
        "metrics": (options.allow_metrics, options.metrics_address, options.metrics_port),
    }
    opened = {name: (address, port) for name, (is_open, address, port) in ports.items() if is_open}
    for name, (_, port) in opened.items():
        if not port:
            print(f"--{name}-port=0: a unit for sockets needs a number from 1 to 65535", file=sys.stderr)
            return 1
    print(render_sockets(opened), end="")
    return 0


def _with_whole_paths(words: Sequence[str]) -> list[str]:
    """Return the flags with whole paths of repositories and of ``@files``: systemd starts a service in ``/``."""
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("@"):
            found.append(f"@{_whole_path(word[1:])}")
        elif name in _REPOSITORIES and equals:
            found.append(f"{name}={_whole_path(value)}")
        else:
            found.append(_whole_path(word) if found and found[-1] in _REPOSITORIES else word)
    return found


def _whole_path(value: str) -> str:
    return value if "://" in value else str(Path(value).absolute())


def _user(text: str) -> str:
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_.-]*|[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a user")
    return text


def _from(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``low`` to ``high``."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {low} to {high}")
        return int(text)

    return read
