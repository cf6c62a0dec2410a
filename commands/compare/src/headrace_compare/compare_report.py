"""The result of a comparison, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace import one_line
from headrace_compare.comparison import Comparison, Found

#: Differences of one kind in one field of a model that are shown one by one.
_SHOWN = 3


def as_text(result: Comparison, urls: Sequence[str]) -> str:
    """Return the differences by model and field, then a summary."""
    return "\n".join([*_differences(result, urls), *_summary(result, urls)]) + "\n"


def as_json(result: Comparison, urls: Sequence[str]) -> str:
    """Return an object with the differences, at most 10,000, and the summary."""
    return json.dumps(
        {
            "servers": list(urls),
            "notes": result.notes,
            "requests": dict(result.requests),
            "differences": [
                {
                    "model": each.model,
                    "place": each.place,
                    "kind": each.difference.kind,
                    "field": each.difference.field,
                    "first": each.difference.first,
                    "second": each.difference.second,
                    "docs": each.docs,
                }
                for each in result.found
            ],
            "kinds": dict(result.kinds),
            "latency_ms": {url: _latency(times) for url, times in zip(urls, result.latencies_ns, strict=True)},
        },
        indent=2,
    )


def _differences(result: Comparison, urls: Sequence[str]) -> Iterator[str]:
    groups = dict[tuple[str, str, str], list[Found]]()
    for each in result.found:
        if each.docs:
            continue
        field = each.difference.field.partition("[")[0]
        groups.setdefault((each.model, each.difference.kind, field), []).append(each)
    for (model, kind, _), found in groups.items():
        yield one_line(f"{model or 'server'}: {kind}")
        for each in found[:_SHOWN]:
            difference = each.difference
            yield one_line(f"  {each.place}: {difference.field}")
            yield one_line(f"    {urls[0]}: {difference.first}")
            yield one_line(f"    {urls[1]}: {difference.second}")
        if len(found) > _SHOWN:
            yield f"  and {len(found) - _SHOWN} more"
        yield ""


def _summary(result: Comparison, urls: Sequence[str]) -> Iterator[str]:
    yield from map(one_line, result.notes)
    for url, times in zip(urls, result.latencies_ns, strict=True):
        if times:
            latencies = ", ".join(f"{name} {value:.2f} ms" for name, value in _latency(times).items())
            yield f"{one_line(url)}: {latencies}"
    for page, count in sorted(result.documented.items()):
        yield f"{_number(count, 'difference')} as documented: {page}"
    total, models = sum(result.requests.values()), len(result.requests)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(result.kinds.items()))
    count = sum(result.kinds.values())
    differences = "no difference" if not count else f"{_number(count, 'difference')}: {kinds}"
    yield f"{_number(total, 'request')} to {_number(models, 'model')}: {differences}"


def _latency(times: Sequence[int]) -> dict[str, Any]:
    if not times:
        return {}
    middle, high = np.percentile(times, [50, 99]) / 1e6
    return {"p50": round(float(middle), 3), "p99": round(float(high), 3)}


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
