"""How long decoupled models take to their first response, for ``--metrics-config=histogram_latencies=true``
(docs/spec/behaviours.md section 7.3). Event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import monotonic_ns
from typing import Protocol
from weakref import WeakKeyDictionary

import pluggy
from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.ticket import Ticket
from headrace.telemetry.exposition import number

hookimpl = pluggy.HookimplMarker("headrace")

NAME = "nv_inference_first_response_histogram_ms"
HELP = "Duration from request to first response in milliseconds"
DEFAULT_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


class FirstResponseTimes:
    """The histogram of one model version, in whole milliseconds."""

    def __init__(self, bounds_ms: Sequence[float], clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self.bounds_ms, self._clock_ns = bounds_ms, clock_ns
        self.counts = [0] * (len(bounds_ms) + 1)
        self.total_ms = 0

    def record(self, ticket: Ticket) -> None:
        """Count the first response to ``ticket``, which is given now."""
        ms = (self._clock_ns() - ticket.arrival_ns) // 1_000_000
        self.counts[bisect_left(self.bounds_ms, ms)] += 1
        self.total_ms += ms


class TimedKernel(Protocol):
    """What is needed of a `headrace.schedulers.kernel.Kernel`."""

    def watch_first_responses(self, record: Callable[[Ticket], None]) -> None: ...


class TimedModel(Protocol):
    """What is needed of a `headrace.models.served.ServedModel`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def scheduler(self) -> TimedKernel: ...


class FirstResponses:
    """The histograms of all decoupled models, as a plugin of the server: they live as long as the model."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[object, FirstResponseTimes] = WeakKeyDictionary()

    @hookimpl
    def observe_model(self, model: TimedModel) -> None:
        if model.config.model_transaction_policy.decoupled:
            times = self._models[model] = FirstResponseTimes(bounds_of(model.config))
            model.scheduler.watch_first_responses(times.record)

    def family(self, models: Iterable[tuple[object, dict[str, str]]]) -> Metric:
        """Return the family of ``models``, each with its labels."""
        metric = Metric(NAME, HELP, "histogram")
        for model, labels in models:
            if (times := self._models.get(model)) is None:
                continue
            counts = list(accumulate(times.counts))
            metric.samples.append(Sample(f"{NAME}_count", labels, counts[-1]))
            metric.samples.append(Sample(f"{NAME}_sum", labels, times.total_ms))
            for bound, count in zip((*map(number, times.bounds_ms), "+Inf"), counts, strict=True):
                metric.samples.append(Sample(f"{NAME}_bucket", {**labels, "le": bound}, count))
        return metric


def bounds_of(config: ModelConfig) -> Sequence[float]:
    """Return the upper bounds that ``model_metrics`` of ``config`` names for the histogram, else Triton's own."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == NAME:
            return tuple(control.histogram_options.buckets)
    return DEFAULT_BOUNDS_MS
