"""The command ``headrace compare``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace import Command, one_line

if TYPE_CHECKING:
    from headrace_compare.answers import ComparedServer
    from headrace_compare.comparison import Comparer, Progress
    from headrace_compare.request_sources import ComparedRequest

#: The exit code if there is nothing to compare: a wrong file, or a server that does not answer.
CANNOT_COMPARE = 2
_PROGRESS_S = 1.0
_LONGEST_TIMEOUT_S = 86_400


class Compare(Command):
    """Sends the same requests to two servers."""

    name = "compare"
    help = "send the same requests to two servers, and report every difference"
    synopsis = "[options] <url> <url>"
    description = (
        "Send the same requests to two servers of the v2 protocol, and report every difference: status, outputs, "
        "values, errors, metadata, configs and streams. Exits with 0 if there is none, 1 if there is any, 2 if it "
        "cannot compare."
    )
    example = "headrace compare http://triton:8000 http://localhost:8000 --requests requests.jsonl"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("url", nargs=2, type=_url, help="http://, https://, grpc:// or grpcs://, with the port")
        parser.add_argument("--requests", metavar="FILE", help="recorded requests; default: generated ones")
        parser.add_argument("--model", action="append", default=[], help="this model only; may be repeated")
        parser.add_argument(
            "--count", type=_whole, default=10, metavar="N", help="generated requests per model; default: 10"
        )
        parser.add_argument("--seed", type=_whole, default=0, help="seed of the generated requests; default: 0")
        parser.add_argument("--rtol", type=_tolerance, help="relative tolerance of FP16, BF16, FP32 and FP64")
        parser.add_argument("--atol", type=_tolerance, help="absolute tolerance of the same types")
        parser.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="FIELD",
            help="ignore fields with this prefix; may be repeated",
        )
        parser.add_argument(
            "--header", action="append", default=[], metavar="NAME:VALUE", help="sent with each request"
        )
        parser.add_argument(
            "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="timeout of a request; default: 60"
        )
        parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report. Return 0 without a difference, 1 with one, 2 if it cannot compare."""
        from headrace_compare.answer_differences import Tolerances
        from headrace_compare.answers import Unreachable
        from headrace_compare.compare_report import as_json, as_text
        from headrace_compare.comparison import Comparer, compare_all
        from headrace_compare.request_sources import BadRequests

        try:
            with ExitStack() as stack:
                targets = [stack.enter_context(closing(_target(url, arguments))) for url in arguments.url]
                tolerances = Tolerances(arguments.rtol, arguments.atol)
                comparer = Comparer(targets[0], targets[1], tolerances, arguments.ignore)
                comparer.compare_servers()
                compare_all(comparer, _requests(comparer, arguments), _progress())
        except (BadRequests, Unreachable) as error:
            print(one_line(str(error)), file=sys.stderr)
            return CANNOT_COMPARE
        result = comparer.result
        shown = as_json if arguments.format == "json" else as_text
        print(shown(result, arguments.url).rstrip("\n"))
        return int(bool(result.kinds))


def _requests(comparer: Comparer, arguments: argparse.Namespace) -> Iterator[ComparedRequest]:
    """Yield the requests. A file is read to its end before the first is sent."""
    from headrace_compare.answers import Unreachable
    from headrace_compare.request_sources import BadRequests, made_requests, read_requests

    models: Sequence[str] = arguments.model
    if arguments.requests is not None:
        path, default = Path(arguments.requests), models[0] if len(models) == 1 else ""
        if not sum(1 for _ in read_requests(path, default)):
            raise BadRequests(f"{path}: no request is in it")
        for request in read_requests(path, default):
            if not models or request.model in models:
                yield request
        return
    names = models or comparer.models()
    if not names:
        raise Unreachable("no model is ready on both servers")
    for name in names:
        documents = comparer.compare_model(name)
        if not documents.metadata:
            raise Unreachable(f"'{one_line(name)}' is no model that is ready on {arguments.url[0]}")
        yield from made_requests(name, documents.metadata, documents.config, arguments.count, arguments.seed)


def _target(url: str, arguments: argparse.Namespace) -> ComparedServer:
    """Return the server at ``url``. Raises `Unreachable`."""
    from headrace_compare.answers import Unreachable
    from headrace_compare.http_target import HttpTarget
    from headrace_compare.request_headers import checked_headers

    headers = dict[str, str]()
    for each in arguments.header:
        name, colon, value = each.partition(":")
        if not (colon and name.strip()):
            raise Unreachable("--header: expected NAME:VALUE")  # the text may be a secret
        headers[name.strip()] = value.strip()
    try:
        headers = checked_headers(headers)
    except ValueError as error:
        raise Unreachable(f"--header: {one_line(str(error))}") from error
    if urlsplit(url).scheme in ("http", "https"):
        return HttpTarget(url, headers, arguments.timeout)
    try:
        from headrace_compare.grpc_target import GrpcTarget
    except ImportError as error:
        raise Unreachable(f"{url} needs what is not installed here: pip install 'headrace-compare[grpc]'") from error
    return GrpcTarget(url, headers, arguments.timeout)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https", "grpc", "grpcs") and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise argparse.ArgumentTypeError(
            f"'{one_line(text)}' is no address: expected http://HOST:PORT or grpc://HOST:PORT"
        )
    return text


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is no tolerance: expected 0 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{value} is no time-out: expected more than 0, at most {_LONGEST_TIMEOUT_S}")
    return value


def _progress() -> Progress:
    """Return a function that prints the progress on stderr, once a second."""
    last = time.monotonic()

    def show(done: int, differing: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_S:
            last = time.monotonic()
            print(f"{done} requests, {differing} differ", file=sys.stderr)

    return show
