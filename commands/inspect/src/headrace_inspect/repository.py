"""``headrace load``, ``unload`` and ``index``: the models of a running server."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from headrace import ServerCommand, draw_table, one_line

_HEAD = ("Model", "Version", "State", "Memory MiB", "Reason")


class Load(ServerCommand):
    name = "load"
    help = "load a model of a running server, or what has changed of it"
    synopsis = "[options] <model>"
    description = (
        "Load or reload a model of a running server, and wait until it serves. A model whose process "
        "has crashed is loaded in every control mode."
    )
    example = "headrace load digits --url http://127.0.0.1:8000"
    path = "load"
    restricted = "loading is"
    timeout_s: ClassVar[float | None] = None  # a load has no limit that is known here

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", help="the model's name")
        self.add_server_arguments(parser, version=False)

    def question(self, arguments: Namespace) -> tuple[str, str, Mapping[str, Any] | None]:
        return "POST", f"v2/repository/models/{quote(arguments.model, safe='')}/{self.path}", {}

    def picture(self, document: None, arguments: Namespace) -> Iterator[str]:
        yield f"model '{one_line(arguments.model)}' is loaded"


class Unload(Load):
    name = "unload"
    help = "unload a model of a running server"
    description = (
        "Unload a model of a running server. The server first answers the requests that the model has; the command "
        "does not wait for that."
    )
    example = "headrace unload digits --url http://127.0.0.1:8000"
    path = "unload"
    timeout_s = 10.0

    def picture(self, document: None, arguments: Namespace) -> Iterator[str]:
        yield f"model '{one_line(arguments.model)}' takes no more requests"


class Index(ServerCommand):
    name = "index"
    help = "list the models of a running server, with their states"
    description = "List the models of a running server, with their states, and why one does not serve."
    example = "headrace index --url http://127.0.0.1:8000"
    path = "index"
    restricted = "the index is"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--ready", action="store_true", help="list only ready versions")
        self.add_server_arguments(parser, version=False)

    def question(self, arguments: Namespace) -> tuple[str, str, Mapping[str, Any] | None]:
        return "POST", "v2/repository/index", {"ready": True} if arguments.ready else {}

    def picture(self, document: Sequence[Mapping[str, Any]], arguments: Namespace) -> Iterator[str]:
        yield draw_table(_HEAD, [_row(line) for line in document]).rstrip("\n") if document else "no models"


def _row(line: Mapping[str, Any]) -> list[str]:
    memory = line.get("memory_bytes")
    return [
        one_line(line["name"]),
        one_line(line.get("version", "")),
        one_line(line.get("state", "")),
        "" if memory is None else f"{memory / (1 << 20):,.0f}",
        one_line(line.get("reason", "")),
    ]
