"""The metrics of a model that generates text: its tokens and their times.

``nv_llm_*``, with the labels ``model`` and ``version``, on the server's page of metrics. Only one thread writes them:
the one on which `headrace_llm.generation_instance.GenerationInstance` checks its streams. Engines only note events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Final

from headrace import MetricKind, MetricOperation, Model, Services

#: Bounds of the histograms in milliseconds.
FIRST_TOKEN_MS: Final = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
BETWEEN_TOKENS_MS: Final = (0.5, 1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 500, 1000, 2500, 10_000)

#: This metric is on the page after the first `GenerationMetrics.note_cache_usage`.
CACHE_USAGE: Final = "nv_llm_cache_usage_ratio"
_FAMILIES: Final[Mapping[str, tuple[MetricKind, str, tuple[float, ...] | None]]] = {
    "nv_llm_input_tokens": ("counter", "Tokens of prompts", None),
    "nv_llm_output_tokens": ("counter", "Tokens that were generated", None),
    "nv_llm_time_to_first_token_ms": ("histogram", "From the request to its first token", FIRST_TOKEN_MS),
    "nv_llm_queue_time_ms": ("histogram", "From the request to the engine's first work on it", FIRST_TOKEN_MS),
    "nv_llm_time_between_tokens_ms": ("histogram", "From one part of an answer to the next", BETWEEN_TOKENS_MS),
    "nv_llm_cache_usage_ratio": ("gauge", "Used part of the cache of keys and values, from 0 to 1", None),
    "nv_llm_streams": ("gauge", "Requests that the engine has, running or waiting", None),
}


class GenerationMetrics:
    """The metrics of one instance. `publish` and `close` run on one thread at a time, the others on any."""

    def __init__(self, model: Model) -> None:
        self._services: Services | None = model.services
        self._handles: dict[str, int] = {}
        self._families: list[int] = []
        #: The events since `publish`. An engine only appends, which is atomic.
        self._noted: deque[tuple[str, float]] = deque()
        self._tokens: deque[tuple[int, int, bool]] = deque()
        self._streams = 0
        #: The ratio that was noted last, and the one on the page. None: no ratio was noted.
        self._cache_usage: float | None = None
        self._shown_usage: float | None = None
        self._labels = {"model": model.name, "version": str(model.version)}
        for name in _FAMILIES:
            if name != CACHE_USAGE:
                self._create(name)

    def _create(self, name: str) -> None:
        if self._services is not None:
            kind, text, bounds = _FAMILIES[name]
            family = self._services.metric_family(name, text, kind)
            self._families.append(family)
            self._handles[name] = self._services.metric(family, self._labels, bounds)

    def note(self, name: str, value: float) -> None:
        """Note ``value`` for a counter or a histogram. Any thread; never blocks."""
        self._noted.append((name, value))

    def note_tokens(self, count: int, took_ns: int, is_first: bool) -> None:
        """Note ``count`` new tokens of one stream, ``took_ns`` after those before; or after its request, if first."""
        self._tokens.append((count, took_ns, is_first))

    def note_cache_usage(self, ratio: float) -> None:
        """Note the used part of the engine's cache of keys and values, from 0 to 1. Any thread; never blocks."""
        self._cache_usage = ratio

    def publish(self, streams: int) -> None:
        """Write the noted events, and the number of open ``streams``.

        Values of one bucket are written as one, because each write of a model in a process is a message.
        """
        counted, observed = dict[str, float](), dict[tuple[str, int], list[float]]()

        def observe(name: str, value: float) -> None:
            bounds = _FAMILIES[name][2] or ()
            observed.setdefault((name, bisect_left(bounds, value)), []).append(value)

        for _ in range(len(self._tokens)):
            count, took_ns, is_first = self._tokens.popleft()
            counted["nv_llm_output_tokens"] = counted.get("nv_llm_output_tokens", 0) + count
            observe("nv_llm_time_to_first_token_ms" if is_first else "nv_llm_time_between_tokens_ms", took_ns / 1e6)
        for _ in range(len(self._noted)):
            name, value = self._noted.popleft()
            if _FAMILIES[name][0] == "histogram":
                observe(name, value)
            else:
                counted[name] = counted.get(name, 0) + value
        for (name, _), values in observed.items():
            self._update(name, "observe", sum(values) / len(values), len(values))
        for name, value in counted.items():
            self._update(name, "increment", value)
        if self._cache_usage is not None and self._cache_usage != self._shown_usage:
            if self._shown_usage is None:
                self._create(CACHE_USAGE)
            self._shown_usage = self._cache_usage
            self._update(CACHE_USAGE, "set", self._shown_usage)
        if streams != self._streams:
            self._update("nv_llm_streams", "increment", streams - self._streams)
            self._streams = streams

    def close(self) -> None:
        """Release the metrics."""
        if self._services is not None:
            for handle in (*self._handles.values(), *self._families):
                self._services.release(handle)
        self._handles = {}

    def _update(self, name: str, operation: MetricOperation, value: float, times: int = 1) -> None:
        if self._services is not None and name in self._handles:
            self._services.update_metric(self._handles[name], operation, value, times)
