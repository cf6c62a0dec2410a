"""vLLM's own metrics on the server's page.

vLLM's ``PrometheusStatLogger`` makes its metrics by classes that a subclass may replace, as vLLM does for Ray. Here
they are replaced by metrics of the server. So names, bounds and labels are those of vLLM's own page. The labels
``model`` and ``version`` are added, as in Triton's vLLM backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace import MetricKind, Services


class ServerMetric:
    """Replaces a metric of prometheus-client, with the methods that vLLM calls. On the engine's thread."""

    def __init__(
        self,
        made: ServerMetrics,
        kind: MetricKind,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] = (),
        buckets: Sequence[float] | None = None,
        **_: Any,
    ) -> None:
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"  # as prometheus-client prints it
        self._made, self._kind, self._names, self._buckets = made, kind, tuple(labelnames), buckets
        self._family = made.family(name, documentation, kind)
        self._metric: int | None = None
        self._labelled: dict[tuple[tuple[str, str], ...], ServerMetric] = {}

    def labels(self, *values: Any, **named: Any) -> ServerMetric:
        """Return this metric for the values of its labels."""
        labels = {**dict(zip(self._names, values, strict=False)), **named}
        key = tuple(sorted((name, str(value)) for name, value in labels.items()))
        if key not in self._labelled:  # vLLM asks for some of them at each step of the engine
            labelled = self._labelled[key] = object.__new__(ServerMetric)
            labelled._made, labelled._kind, labelled._names, labelled._buckets = (
                self._made,
                self._kind,
                (),
                self._buckets,
            )
            labelled._family, labelled._labelled = self._family, {}
            labelled._metric = self._made.metric(self._family, labels, self._buckets)
        return self._labelled[key]

    def inc(self, value: float = 1) -> None:
        if value:
            self._update("increment", value)

    def set(self, value: float) -> None:
        self._update("set", value)

    def set_to_current_time(self) -> None:
        self._update("set", time.time())

    def observe(self, value: float) -> None:
        self._update("observe", value)

    def _update(self, operation: str, value: float) -> None:
        if self._metric is None:
            self._metric = self._made.metric(self._family, {}, self._buckets)
        self._made.update(self._metric, operation, value)


class ServerMetrics:
    """The metrics of one engine. ``labels`` are added to each. `release` when the engine has ended."""

    def __init__(self, services: Services, labels: Mapping[str, str]) -> None:
        self._services, self._labels = services, labels
        self._handles: list[int] = []

    def logger_members(self, base: type[Any]) -> dict[str, Any]:
        """Return the members of a subclass of ``base``, ``PrometheusStatLogger``, that writes here."""
        made: dict[str, Any] = {
            "_gauge_cls": partial(ServerMetric, self, "gauge"),
            "_counter_cls": partial(ServerMetric, self, "counter"),
            "_histogram_cls": partial(ServerMetric, self, "histogram"),
        }
        for name in ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls"):
            part = getattr(base, name)
            made[name] = type(part.__name__, (part,), {each: made[each] for each in made if hasattr(part, each)})
        return made

    def family(self, name: str, description: str, kind: MetricKind) -> int:
        self._handles.append(self._services.metric_family(name, description, kind))
        return self._handles[-1]

    def metric(self, family: int, labels: Mapping[str, Any], buckets: Sequence[float] | None) -> int:
        texts = {name: str(value) for name, value in labels.items()}
        self._handles.append(self._services.metric(family, {**self._labels, **texts}, buckets))
        return self._handles[-1]

    def update(self, metric: int, operation: Any, value: float) -> None:
        self._services.update_metric(metric, operation, float(value))

    def release(self) -> None:
        """Remove the metrics from the page."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            self._services.release(handle)


def logger_class(metrics: ServerMetrics | None, note_cache_usage: Callable[[float], None] | None) -> type[Any]:
    """Return the class of vLLM's stat logger, with which vLLM takes the times of requests. Needs vLLM.

    It writes to ``metrics``, and to no page if that is None. ``note_cache_usage`` gets the used part of the engine's
    cache of keys and values after each step.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def record(self: Any, scheduler_stats: Any = None, *given: Any, **named: Any) -> None:
        if scheduler_stats is not None and note_cache_usage is not None:
            note_cache_usage(scheduler_stats.kv_cache_usage)
        if metrics is not None:
            PrometheusStatLogger.record(self, scheduler_stats, *given, **named)

    if metrics is not None:
        members = {**metrics.logger_members(PrometheusStatLogger), "record": record}
    else:  # vLLM adds prometheus-client's metrics unless there is a subclass of that class
        names = [each for each, value in vars(PrometheusStatLogger).items() if callable(value) and each[0] != "_"]
        members = {**dict.fromkeys((*names, "__init__"), _do_nothing), "record": record}
    return type("ServerStatLogger", (PrometheusStatLogger,), members)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces a method of vLLM's stat logger."""
