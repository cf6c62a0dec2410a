"""Draws the traffic of a router with characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace import draw_table, one_line

_BAR = 30


def picture(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines to print for ``document``, the state of a router. Raises `LookupError` or `TypeError`."""
    targets, shadow = document["targets"], document["shadow"]
    total = sum(each["requests"] for each in targets)
    yield f"{one_line(document['model'])} version {document['version']}: {total:,} requests{_rules(document)}"
    yield ""
    yield from _split(targets, shadow)
    yield ""
    yield draw_table(
        ("Target", "Weight", "Requests", "of all", "Errors", f"Last {document['window_s']:g} s", "failed", "p99 ms"),
        [_row(each, total) for each in targets],
    ).rstrip("\n")
    for each in targets:
        if each["rolled_back"]:
            yield f"'{one_line(each['name'])}' is rolled back: {one_line(each['rolled_back']['reason'])}"
    if shadow:
        yield from _differences(shadow)


def _rules(document: Mapping[str, Any]) -> str:
    parts = [f"; sticky by {one_line(document['sticky'])}"] if document["sticky"] else []
    parts += [f"; {one_line(rule)}" for rule in document["rules"]]
    return "".join(parts)


def _split(targets: Sequence[Mapping[str, Any]], shadow: Mapping[str, Any] | None) -> Iterator[str]:
    """Draw a branch for each target, as wide as its share, and a dotted one for the shadow."""
    width = max(len(one_line(each["name"])) for each in [*targets, *([shadow] if shadow else [])])
    rows = [(one_line(each["name"]), each["share"], "#") for each in targets]
    if shadow:
        rows.append((one_line(shadow["name"]), shadow["fraction"], "."))
    for index, (name, share, mark) in enumerate(rows):
        stem = "--+-->" if index == 0 else "  `-->" if index == len(rows) - 1 else "  +-->"
        stem = "----->" if len(rows) == 1 else "  `..>" if mark == "." else stem
        bar = mark * max(1 if share else 0, round(_BAR * share))
        yield f"{stem} {name:<{width}} {100 * share:6.2f} %  {bar}{'  copies' if mark == '.' else ''}".rstrip()


def _row(each: Mapping[str, Any], total: int) -> list[str]:
    window = each["window"]
    return [
        one_line(each["name"]),
        f"{each['weight']:g}",
        f"{each['requests']:,}",
        f"{100 * each['requests'] / total:.2f} %" if total else "",
        f"{each['errors']:,}",
        f"{window['requests']:,}",
        f"{100 * window['error_rate']:.2f} %",
        f"{window['p99_us'] / 1000:.3g}",
    ]


def _differences(shadow: Mapping[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{count:,} {one_line(outcome)}" for outcome, count in shadow["requests"].items())
    yield f"Copies to '{one_line(shadow['name'])}': {counts}"
    if shadow["outputs"]:
        yield draw_table(
            ("Output", "Elements", "Beyond tolerance", "Mean relative difference", "Largest difference"),
            [
                (
                    one_line(name),
                    f"{each['elements']:,}",
                    f"{100 * each['beyond_tolerance'] / each['elements']:.2f} %" if each["elements"] else "",
                    f"{each['mean_relative_difference']:.3g}",
                    f"{each['largest_difference']:.3g}",
                )
                for name, each in shadow["outputs"].items()
            ],
        ).rstrip("\n")
