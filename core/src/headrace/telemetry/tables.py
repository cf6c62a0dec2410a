"""Text tables of the start-up log, drawn as Triton draws them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.telemetry.logs import escape


def draw(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A boxed table. A cell is one line: control characters in it are escaped."""
    cells = [[one_line(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule]) + "\n"


def one_line(value: str) -> str:
    """``value`` with its control characters escaped."""
    return value if value.isprintable() else escape(value)[1:-1]
