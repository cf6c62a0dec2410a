"""``headrace traffic``: shows how the requests to a router are split, and changes it. It asks a running server.

::

    headrace traffic show canary
    headrace traffic set canary digits:1=80 digits:2=20 --shadow 0.5
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from headrace import Command, one_line
from headrace_router.traffic_picture import picture

#: Time limit and size limit of the server's answer.
_TIMEOUT_S = 10.0
_MOST_BYTES = 4 << 20


class TrafficCommand(Command):
    name = "traffic"
    help = "show and change how a router splits its requests"
    synopsis = "[options] show <model> | set <model> <target>=<weight>..."
    description = "Show how the requests to a router are split, or change it. Asks a running server."
    example = "headrace traffic set canary digits:1=80 digits:2=20"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=("show", "set"), help="show the split, or set it")
        parser.add_argument("model", help="the router's name")
        parser.add_argument(
            "weights", nargs="*", type=_weight, metavar="TARGET=WEIGHT", help="the weight of each target, to set it"
        )
        parser.add_argument(
            "--shadow",
            type=_number,
            metavar="FRACTION",
            help="the fraction of requests that the shadow gets, to set it",
        )
        parser.add_argument(
            "--version", default="", metavar="N", help="the version of the router; by default the latest"
        )
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="the HTTP address of the server")
        parser.add_argument(
            "--header", type=_header, default={}, metavar="NAME:VALUE", help="the key, if the change is restricted"
        )
        parser.add_argument("--json", action="store_true", help="print the server's answer as it is")

    def run(self, arguments: Namespace) -> int:
        """Print the server's answer. Return 0, or 1 if there is none."""
        try:
            change = _change(arguments)
            told = _ask(_address(arguments.url, arguments.model, arguments.version), arguments.header, change)
            text = json.dumps(told, indent=2) if arguments.json else "\n".join(picture(told))
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


def _weight(text: str) -> tuple[str, float]:
    target, equals, number = text.rpartition("=")
    if not equals or not target.strip():
        raise ArgumentTypeError(f"'{one_line(text)}' is no TARGET=WEIGHT, such as digits:2=10")
    return target.strip(), _number(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"'{one_line(text)}' is no number") from None


def _header(text: str) -> dict[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ArgumentTypeError("expected NAME:VALUE")  # the text does not show the value: it may be the secret
    return {name.strip(): value.strip()}


def _change(arguments: Namespace) -> Mapping[str, Any] | None:
    """Return the body of a change; None to show. Raises `ValueError` for words that do not fit the action."""
    weights = dict(arguments.weights)
    change = {"weights": weights} if weights else {}
    change |= {} if arguments.shadow is None else {"shadow": arguments.shadow}
    if len(weights) < len(arguments.weights):
        raise ValueError("a target is named twice")
    if arguments.action == "show" and change:
        raise ValueError("'show' changes nothing: use 'set' for weights and --shadow")
    if arguments.action == "set" and not change:
        raise ValueError("'set' needs a weight for each target, such as digits:1=80 digits:2=20, or --shadow")
    return change or None


def _address(url: str, model: str, version: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the address must begin with http:// or https://")
    path = f"/versions/{quote(version, safe='')}" if version else ""
    return f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}{path}/traffic"


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
