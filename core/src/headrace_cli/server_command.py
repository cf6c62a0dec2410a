"""A command that sends a request to a running server over HTTP."""

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

#: Size limit of the server's answer.
_MOST_BYTES = 16 << 20


class ServerCommand(Command):
    """Requests ``/v2/models/<model>[/versions/<version>]/<path>`` of a server, and prints a picture of the response.

    ``add_arguments`` of a subclass adds ``model``, and calls `add_server_arguments`. A command that sends another
    request overrides `question`.
    """

    #: The end of the path.
    path: ClassVar[str]
    #: The command fails if the server sends nothing for this many seconds; None for no limit.
    timeout_s: ClassVar[float | None] = 10.0
    #: The purpose of the key of ``--header``, in its help.
    restricted: ClassVar[str]

    def add_server_arguments(self, parser: ArgumentParser, *, version: bool = True) -> None:
        """Add ``--version``, ``--url``, ``--header`` and ``--json`` to ``parser``; the first one if ``version``."""
        if version:
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

    def question(self, arguments: Namespace) -> tuple[str, str, Mapping[str, Any] | None]:
        """Return the HTTP method, the path from ``v2`` on, and the JSON object to send, if any.

        Raises `ValueError` if ``arguments`` do not fit.
        """
        change = self.change(arguments)
        version = f"/versions/{quote(arguments.version, safe='')}" if arguments.version else ""
        path = f"v2/models/{quote(arguments.model, safe='')}{version}/{self.path}"
        return "GET" if change is None else "PUT", path, change

    @abstractmethod
    def picture(self, document: Any, arguments: Namespace) -> Iterable[str]:
        """Return the lines to print for ``document``, the server's answer as JSON; None if it is empty.

        An error in reading it is one line on stderr.
        """

    def run(self, arguments: Namespace) -> int:
        """Print the server's answer. Return 0, or 1 if there is none."""
        model: str | None = getattr(arguments, "model", None)
        what = f"{arguments.url} about '{model}'" if model else arguments.url
        try:
            method, path, body = self.question(arguments)
            document = self._ask(method, _address(arguments.url, path), arguments.header, body)
            if arguments.json:
                text = "" if document is None else json.dumps(document, indent=2)
            else:
                text = "\n".join(self.picture(document, arguments))
        except HTTPError as error:
            with error:
                print(f"{arguments.url} answers {error.code}: {_error_in(error)}", file=sys.stderr)
        except HTTPException:
            why = "the server on that port does not speak HTTP/1.1; gRPC and HTTP have different ports"
            print(f"cannot ask {what}: {why}", file=sys.stderr)
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"cannot ask {what}: {one_line(str(getattr(error, 'reason', error)))}", file=sys.stderr)
        else:
            if text:
                print(text)  # outside of the try: a closed pipe is not an error of the server
            return 0
        return 1

    def _ask(self, method: str, address: str, headers: dict[str, str], body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(address, data, headers, method=method), timeout=self.timeout_s) as reply:
            text = reply.read(_MOST_BYTES)
        return json.loads(text) if text else None


def _version(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"'{one_line(text)}' is no version: expected a whole number")
    return text


def _header(text: str) -> dict[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ArgumentTypeError("expected NAME:VALUE")  # the text does not show the value: it may be the secret
    return {name.strip(): value.strip()}


def _address(url: str, path: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the address must begin with http:// or https://")
    return f"{url.rstrip('/')}/{path}"


def _error_in(error: HTTPError) -> str:
    try:
        return one_line(str(json.loads(error.read(_MOST_BYTES))["error"]))
    except (OSError, ValueError, LookupError, TypeError):
        return one_line(error.reason)
