"""``headrace explain``: shows why the last batches of a model ran when they did. It asks a running server."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from headrace import Command, draw_table, one_line

#: Time limit and size limit of the server's answer.
_TIMEOUT_S = 10.0
_MOST_BYTES = 16 << 20
_BAR = 40
#: Up to this many sizes have a bar each. More are grouped.
_MOST_BARS = 16


class Explain(Command):
    name = "explain"
    help = "show why the batches of a model ran"
    synopsis = "[options] <model>"
    description = "Show why the last batches of a model ran when they did. Asks a running server."
    example = "headrace explain mlp --url http://127.0.0.1:8000"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", help="the model's name")
        parser.add_argument(
            "--version", type=_version, metavar="N", help="the version; by default the latest that is ready"
        )
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="the HTTP address of the server")
        parser.add_argument(
            "--header", type=_header, default={}, metavar="NAME:VALUE", help="the key, if statistics are restricted"
        )
        parser.add_argument("--last", type=_count, default=12, metavar="N", help="how many batches to show one by one")
        parser.add_argument("--json", action="store_true", help="print the server's answer as it is")

    def run(self, arguments: Namespace) -> int:
        """Print the server's answer. Return 0, or 1 if there is none."""
        try:
            told = _ask(_address(arguments.url, arguments.model, arguments.version or ""), arguments.header)
            text = json.dumps(told, indent=2) if arguments.json else "\n".join(picture(told, arguments.last))
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


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ArgumentTypeError(f"'{one_line(text)}' is no number of batches: expected a whole number from 0 on")
    return int(text)


def _header(text: str) -> dict[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ArgumentTypeError("expected NAME:VALUE")  # the text does not show the value: it may be the secret
    return {name.strip(): value.strip()}


def _address(url: str, model: str, version: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the address must begin with http:// or https://")
    path = f"/versions/{quote(version, safe='')}" if version else ""
    return f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}{path}/explain"


def _ask(address: str, headers: dict[str, str]) -> Mapping[str, Any]:
    with urlopen(Request(address, headers=headers), timeout=_TIMEOUT_S) as reply:
        told = json.loads(reply.read(_MOST_BYTES))
    if not isinstance(told, dict):
        raise TypeError("the answer is no JSON object")
    return told


def _error_in(error: HTTPError) -> str:
    try:
        return one_line(str(json.loads(error.read(_MOST_BYTES))["error"]))
    except (OSError, ValueError, LookupError, TypeError):
        return one_line(error.reason)


def picture(told: Mapping[str, Any], last: int) -> Iterator[str]:
    """Yield the lines to print for ``told``, an answer of the server, with the ``last`` batches one by one."""
    batches = told["batches"]
    yield f"{one_line(told['name'])} version {told['version']}: {_rule(told)}"
    yield f"{told['waiting']} requests wait now, {told['in_flight']} are waiting or being executed"
    yield from _shared(told.get("resources", ()))
    if not batches:
        yield "no batch has run yet"
        return
    yield ""
    yield f"Why the last {len(batches)} batches ran, which took {batches[0]['age_us'] / 1e6:.3g} s until now:"
    yield from _bars([(reason, count) for reason, count in told["reasons"].items()])
    yield ""
    yield "Their rows:"
    yield from _bars(_joined([(size["rows"], size["batches"]) for size in told["sizes"]]))
    yield ""
    waits = ", ".join(f"{name} {us} µs" for name, us in told["longest_wait_us"].items())
    yield f"The request of a batch that waited longest: {waits}"
    if not last:
        return
    yield ""
    shown = batches[-last:]
    head = ("Age ms", "Instance", "Reason", "Requests", "Rows", "First waited µs", "Last waited µs", "Left waiting")
    keys = ("instance", "reason", "requests", "rows", "first_wait_us", "last_wait_us", "waiting")
    yield draw_table(head, [[f"{each['age_us'] / 1000:.1f}", *(str(each[key]) for key in keys)] for each in shown])


def _rule(told: Mapping[str, Any]) -> str:
    parts = [f"scheduler {one_line(told['scheduler'])}", f"{told['instances']} instances"]
    if on_loop := sum(where == "event_loop" for where in told.get("runs_on", {}).values()):
        parts.append(f"{on_loop} of them on the event loop")
    if told["max_batch_size"]:
        parts.append(f"at most {told['max_batch_size']} rows in a batch")
    if told["preferred_batch_size"]:
        parts.append(f"preferred {', '.join(map(str, told['preferred_batch_size']))}")
    if told["max_queue_delay_us"]:
        parts.append(f"a delay of {told['max_queue_delay_us']} µs")
    return ", ".join(parts)


def _shared(resources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line for each rate limiter resource that the instances of the model need."""
    for each in resources:
        where = "" if each["device"] is None else f" on device {each['device']}"
        what = f"{each['in_use']} of {each['units']} units of resource '{one_line(each['resource'])}'{where} are in use"
        yield f"{what}{_whose('by', each['used_by'])}{_whose('; wanted by', each['wanted_by'])}"


def _whose(word: str, units: Mapping[str, int]) -> str:
    names = ", ".join(f"{one_line(name)} ({count})" for name, count in units.items())
    return f"{'' if word[0] == ';' else ' '}{word} {names}" if names else ""


def _bars(counted: Sequence[tuple[object, int]]) -> Iterator[str]:
    """Yield one line each: name, count, share, and a bar whose length is relative to the largest count."""
    most, total = max(count for _, count in counted), sum(count for _, count in counted)
    width = max(len(one_line(str(what))) for what, _ in counted)
    for what, count in counted:
        bar = "#" * max(1, round(_BAR * count / most))
        yield f"  {one_line(str(what)):<{width}} {count:>6} {100 * count / total:5.1f} %  {bar}"


def _joined(sizes: Sequence[tuple[int, int]]) -> Sequence[tuple[object, int]]:
    """Return ``sizes``; if there are more than 16, grouped between powers of two."""
    if len(sizes) <= _MOST_BARS:
        return sizes
    joined: dict[str, int] = {}
    for rows, count in sizes:
        low = 1 << max(0, rows.bit_length() - 1)
        joined[f"{low}-{2 * low - 1}"] = joined.get(f"{low}-{2 * low - 1}", 0) + count
    return list(joined.items())
