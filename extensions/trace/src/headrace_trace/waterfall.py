"""One request as a waterfall: a bar for each call of a model and for each step in it, as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from headrace_trace.trace_reading import ReadCall

#: Each step of a call: its kind, and the events from which to which it lasts.
_STEPS = (
    ("receive", "HTTP_RECV_START", "HTTP_RECV_END"),
    ("queue", "QUEUE_START", "COMPUTE_START"),
    ("input", "COMPUTE_START", "COMPUTE_INPUT_END"),
    ("infer", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("output", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    ("send", "HTTP_SEND_START", "HTTP_SEND_END"),
    ("send", "GRPC_SEND_START", "GRPC_SEND_END"),
)
_COLOURS = {
    "call": "#8a94a6", "receive": "#6f7fd8", "queue": "#e0a32e", "input": "#3f9ad6", "infer": "#2f9e62",
    "output": "#57b8b0", "send": "#a06fd8",
}  # fmt: skip
#: A request with more rows is cut.
MAX_ROWS = 200
_ROW, _LABEL, _CHART, _TIME = 22, 220, 620, 90


class Row(NamedTuple):
    """A bar. ``depth`` is 0 for the request; the times are nanoseconds from the begin of the request."""

    depth: int
    kind: str
    label: str
    begin_ns: int
    took_ns: int


def rows(root: ReadCall) -> list[Row]:
    """Return the bars of a request, at most `MAX_ROWS`."""
    found: list[Row] = []
    for row in _rows(root):
        if len(found) == MAX_ROWS:
            break
        found.append(row)
    return found


def _rows(root: ReadCall) -> Iterator[Row]:
    start_ns = root.begin_ns
    waiting: list[tuple[int, ReadCall | Row]] = [(0, root)]
    while waiting:
        depth, item = waiting.pop()
        if isinstance(item, Row):
            yield item
            continue
        label = f"{item.model or 'not read'} {item.version or ''}".rstrip()
        yield Row(depth, "call", label, item.begin_ns - start_ns, item.took_ns)
        parts: list[tuple[int, ReadCall | Row]] = [(child.begin_ns - start_ns, child) for child in item.children]
        for kind, first, last in _STEPS:
            took_ns = item.between(first, last)
            if took_ns is not None and took_ns > 0:
                begin_ns = item.times[first] - start_ns
                parts.append((begin_ns, Row(depth + 1, kind, kind, begin_ns, took_ns)))
        parts.sort(key=lambda part: part[0], reverse=True)
        waiting += [(depth + 1, part) for _, part in parts]


def title(root: ReadCall) -> str:
    named = f" '{root.request_id}'" if root.request_id else ""
    return f"request{named} of model '{root.model}', trace {root.id}: {root.took_ns / 1e6:.3f} ms"


def as_text(root: ReadCall, width: int = 60) -> str:
    """Return the waterfall as lines of text, the bars in ``width`` columns."""
    drawn, total_ns = rows(root), max(root.took_ns, 1)
    labels = [f"{'  ' * row.depth}{row.label}" for row in drawn]
    longest = min(max(map(len, labels)), 40)
    lines = [title(root)]
    for label, row in zip(labels, drawn, strict=True):
        left = min(round(row.begin_ns * width / total_ns), width - 1)
        size = max(1, min(round(row.took_ns * width / total_ns), width - left))
        bar = f"{' ' * left}{('=' if row.kind == 'call' else '#') * size}"
        lines.append(f"{label[:longest]:{longest}} |{bar:{width}}| {row.took_ns / 1e6:9.3f} ms")
    return "\n".join(lines) + "\n"


def as_svg(root: ReadCall) -> str:
    """Return the waterfall as an SVG document."""
    drawn, total_ns = rows(root), max(root.took_ns, 1)
    width, top = _LABEL + _CHART + _TIME, 64
    height = top + _ROW * len(drawn) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="600" fill="#1f2430">{escape(title(root))}</text>',
    ]
    for tick in range(5):
        x = _LABEL + _CHART * tick / 4
        parts.append(f'<line x1="{x}" y1="52" x2="{x}" y2="{height - 12}" stroke="#e4e7ee"/>')
        anchor = "start" if not tick else "middle"
        text = f"{total_ns * tick / 4e6:.3g} ms"
        parts.append(f'<text x="{x}" y="46" text-anchor="{anchor}" font-size="11" fill="#5b6475">{text}</text>')
    parts += [_bar(number, row, total_ns, top) for number, row in enumerate(drawn)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(number: int, row: Row, total_ns: int, top: int) -> str:
    y = top + number * _ROW
    x = _LABEL + _CHART * row.begin_ns / total_ns
    size = max(_CHART * row.took_ns / total_ns, 1.5)
    indent = 12 + 14 * min(row.depth, 10)
    weight = ' font-weight="600"' if row.kind == "call" else ""
    label, time = escape(_shortened(row.label, 26 - 2 * min(row.depth, 10))), f"{row.took_ns / 1e6:.3f} ms"
    inset, tall = (6, 10) if row.kind == "call" else (3, 16)
    return (
        f'<text x="{indent}" y="{y + 15}"{weight} fill="#1f2430">{label}</text>'
        f'<rect x="{x:.1f}" y="{y + inset}" width="{size:.1f}" height="{tall}" rx="2" fill="{_COLOURS[row.kind]}"/>'
        f'<text x="{_LABEL + _CHART + _TIME - 10}" y="{y + 15}" text-anchor="end" fill="#5b6475">{time}</text>'
    )


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def slowest(roots: Sequence[ReadCall]) -> ReadCall:
    """Return the request that took longest."""
    return max(roots, key=lambda root: root.took_ns)
