"""The summary that ``headrace trace`` prints: how long the steps of each model took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from headrace import draw_table
from headrace_trace.trace_reading import ReadCall

#: The columns of times: from one event to another.
STEPS = {
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}


def every_call(roots: Iterable[ReadCall]) -> Iterator[ReadCall]:
    """Yield calls, each followed by the calls of other models for it."""
    waiting = list(roots)[::-1]
    while waiting:
        call = waiting.pop()
        yield call
        waiting += call.children[::-1]


def summary(roots: Iterable[ReadCall]) -> str:
    """Return a table with a row for each model: its calls, the mean of each step, and three quantiles of the whole."""
    models: dict[tuple[str, int], list[ReadCall]] = defaultdict(list)
    for call in every_call(roots):
        if call.model:
            models[call.model, call.version].append(call)
    names = ("Model", "Version", "Calls", *(f"{name} ms" for name in STEPS), "p50 ms", "p90 ms", "max ms")
    return draw_table(names, [_row(*key, calls) for key, calls in sorted(models.items())])


def _row(model: str, version: int, calls: Sequence[ReadCall]) -> tuple[str, ...]:
    took = sorted(call.took_ns for call in calls)
    quantiles = (took[(len(took) - 1) // 2], took[(len(took) - 1) * 9 // 10], took[-1])
    return (
        model,
        str(version),
        str(len(calls)),
        *(_mean(calls, *step) for step in STEPS.values()),
        *map(_ms, quantiles),
    )


def _mean(calls: Iterable[ReadCall], first: str, last: str) -> str:
    found = [took for call in calls if (took := call.between(first, last)) is not None]
    return _ms(sum(found) / len(found)) if found else "-"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"
