"""``headrace explain``: shows why the last batches of a model ran, from a running server."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace import ServerCommand, draw_table, one_line

_BAR = 40
#: Up to this many sizes have a bar each. More are grouped.
_MAX_BARS = 16


class Explain(ServerCommand):
    name = "explain"
    help = "show why the batches of a model ran"
    synopsis = "[options] <model>"
    description = "Show why the last batches of a model ran, from a running server."
    example = "headrace explain mlp --url http://127.0.0.1:8000"
    path = "explain"
    restricted = "statistics are"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", help="the model's name")
        self.add_server_arguments(parser)
        parser.add_argument(
            "--last", type=_count, default=12, metavar="N", help="the number of batches to show one by one; default: 12"
        )

    def picture(self, document: Mapping[str, Any], arguments: Namespace) -> Iterator[str]:
        return picture(document, arguments.last)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ArgumentTypeError(f"'{one_line(text)}' is no number of batches: expected a whole number from 0 on")
    return int(text)


def picture(document: Mapping[str, Any], last: int) -> Iterator[str]:
    """Yield the lines to print for ``document``, the response of the server, with each of the ``last`` batches."""
    batches = document["batches"]
    yield f"{one_line(document['name'])} version {document['version']}: {_rule(document)}"
    yield f"{document['waiting']} requests wait now, {document['in_flight']} are waiting or being executed"
    yield from _shared(document.get("resources", ()))
    if not batches:
        yield "no batch has run yet"
        return
    yield ""
    yield f"Why the last {len(batches)} batches ran, which took {batches[0]['age_us'] / 1e6:.3g} s until now:"
    yield from _bars([(reason, count) for reason, count in document["reasons"].items()])
    yield ""
    yield "Their rows:"
    yield from _bars(_joined([(size["rows"], size["batches"]) for size in document["sizes"]]))
    yield ""
    waits = ", ".join(f"{name} {us} µs" for name, us in document["longest_wait_us"].items())
    yield f"The request of a batch that waited longest: {waits}"
    if not last:
        return
    yield ""
    shown = batches[-last:]
    head = ("Age ms", "Instance", "Reason", "Requests", "Rows", "First waited µs", "Last waited µs", "Left waiting")
    keys = ("instance", "reason", "requests", "rows", "first_wait_us", "last_wait_us", "waiting")
    yield draw_table(head, [[f"{each['age_us'] / 1000:.1f}", *(str(each[key]) for key in keys)] for each in shown])


def _rule(document: Mapping[str, Any]) -> str:
    parts = [f"scheduler {one_line(document['scheduler'])}", f"{document['instances']} instances"]
    if on_loop := sum(where == "event_loop" for where in document.get("runs_on", {}).values()):
        parts.append(f"{on_loop} of them on the event loop")
    if document["max_batch_size"]:
        parts.append(f"at most {document['max_batch_size']} rows in a batch")
    if document["preferred_batch_size"]:
        parts.append(f"preferred {', '.join(map(str, document['preferred_batch_size']))}")
    if document["max_queue_delay_us"]:
        parts.append(f"a delay of {document['max_queue_delay_us']} µs")
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
    if len(sizes) <= _MAX_BARS:
        return sizes
    joined: dict[str, int] = {}
    for rows, count in sizes:
        low = 1 << max(0, rows.bit_length() - 1)
        joined[f"{low}-{2 * low - 1}"] = joined.get(f"{low}-{2 * low - 1}", 0) + count
    return list(joined.items())
