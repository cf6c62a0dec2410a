"""A command that asks a running server about a model, over HTTP."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from headrace.command import Command
from headrace.config.path_checks import one_line

#: Time limit and size limit of the server's answer.
_TIMEOUT_S = 10.0
_MOST_BYTES = 16 << 20


class ServerCommand(Command):
    """Asks ``/v2/models/<model>[/versions/<version>]/<path>`` of a server, and prints a picture of the answer.

    ``add_arguments`` of a subclass adds ``model``, and calls `add_server_arguments`.
    """

    #: The end of the path.
    path: ClassVar[str]
    #: What the key of ``--header`` is for, in its help.
    restricted: ClassVar[str]

    def add_server_arguments(self, parser: ArgumentParser) -> None:
        """Add ``--version``, ``--url``, ``--header`` and ``--json`` to ``parser``."""
        parser.add_argument(
            "--version", type=_version, metavar="N", help="the version; by default the latest that is ready"
        )
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="the HTTP address of the server")
        parser.add_argument(
            "--header", type=_header, default={}, metavar="NAME:VALUE", help=f"the key, if {self.restricted} restricted"
        )
        parser.add_argument("--json", action="store_true", help="print the server's answer as it is")

    def change(self, arguments: Namespace) -> Mapping[str, Any] | None:
        """Return the JSON object to send by PUT; None to send GET. Raises `ValueError` if ``arguments`` do not fit."""
        return None

    @abstractmethod
    def picture(self, told: Mapping[str, Any], arguments: Namespace) -> Iterable[str]:
        """Return the lines to print for ``told``, the server's answer. An error in reading it is one line on stderr."""

    def run(self, arguments: Namespace) -> int:
        """Print the server's answer. Return 0, or 1 if there is none."""
        try:
            change = self.change(arguments)
            address = _address(arguments.url, arguments.model, arguments.version or "")
            told = _ask(f"{address}/{self.path}", arguments.header, change)
            text = json.dumps(told, indent=2) if arguments.json else "\n".join(self.picture(told, arguments))
        except HTTPError as error:
            with error:
                print(f"{arguments.url} answers {error.code}: {_error_in(error)}", file=sys.stderr)
        except HTTPException:
            what = "the server on that port does not speak HTTP/1.1; gRPC and HTTP have different ports"
            print(f"cannot ask {arguments.url} about '{arguments.model}': {what}", file=sys.stderr)
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"cannot ask {arguments.url} about '{arguments.model}': {one_line(str(error))}", file=sys.stderr)
        else:
            print(text)  # outside of the try: a closed pipe is not an error of the server
            return 0
        return 1


def _version(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"'{one_line(text)}' is no version: expected a whole number")
    return text


def _header(text: str) -> dict[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ArgumentTypeError("expected NAME:VALUE")  # the text does not show the value: it may be the secret
    return {name.strip(): value.strip()}


def _address(url: str, model: str, version: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the address must begin with http:// or https://")
    path = f"/versions/{quote(version, safe='')}" if version else ""
    return f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}{path}"


def _ask(address: str, headers: dict[str, str], change: Mapping[str, Any] | None) -> Mapping[str, Any]:
    body = None if change is None else json.dumps(change).encode()
    request = Request(address, body, headers, method="GET" if change is None else "PUT")
    with urlopen(request, timeout=_TIMEOUT_S) as reply:
        told = json.loads(reply.read(_MOST_BYTES))
    if not isinstance(told, dict):
        raise TypeError("the answer is no JSON object")
    return told


def _error_in(error: HTTPError) -> str:
    try:
        return one_line(str(json.loads(error.read(_MOST_BYTES))["error"]))
    except (OSError, ValueError, LookupError, TypeError):
        return one_line(error.reason)
