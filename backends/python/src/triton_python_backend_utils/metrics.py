"""Metrics that a model defines, on the server's metrics page.

Without a server, they are in memory, with the server's rules, for unit tests of a model.
Source: docs/spec/behaviours.md sections 7.6 and 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf, nan
from typing import ClassVar, Protocol
from weakref import WeakSet

from headrace import (
    HeadraceError,
    InvalidArgument,
    MetricOperation,
    check_metric_update,
    metric_without_value,
)
from headrace import MetricKind as ServiceKind
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.arguments import Text, choice, lines, real_number
from triton_python_backend_utils.error import TritonModelException


class MetricStore(Protocol):
    """The part of `headrace.backends.services.Services` that is about metrics."""

    def metric_family(self, name: str, description: str, kind: ServiceKind) -> int: ...

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int: ...

    def update_metric(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None: ...

    def metric_value(self, metric: int) -> float: ...

    def release(self, handle: int) -> None: ...


@dataclass(slots=True)
class MetricInMemory:
    """The value of a counter or a gauge, or the observations of a histogram."""

    kind: ServiceKind
    value: float = 0.0
    observed: tuple[float, ...] = ()


class MetricsInMemory:
    """A `MetricStore` in memory. ``metrics`` maps the name of a family and sorted labels to the metric.

    A handle is a position in a list; equal labels share a metric.
    """

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, tuple[tuple[str, str], ...]], MetricInMemory] = {}
        self._families: dict[str, ServiceKind] = {}
        self._names: list[str] = []
        self._handles: list[MetricInMemory] = []

    def metric_family(self, name: str, description: str, kind: ServiceKind) -> int:
        if self._families.setdefault(name, kind) != kind:
            raise InvalidArgument(f"metric family '{name}' is a {self._families[name]}, not a {kind}")
        self._names.append(name)
        return len(self._names) - 1

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        name = self._names[family]
        entry = self.metrics.setdefault((name, tuple(sorted(labels.items()))), MetricInMemory(self._families[name]))
        self._handles.append(entry)
        return len(self._handles) - 1

    def update_metric(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None:
        entry = self._handles[metric]
        check_metric_update(entry.kind, operation, value)
        if operation == "observe":
            entry.observed += (value,) * times
        else:
            entry.value = value if operation == "set" else entry.value + value * times

    def metric_value(self, metric: int) -> float:
        entry = self._handles[metric]
        if entry.kind == "histogram":
            raise metric_without_value(entry.kind)
        return entry.value

    def release(self, handle: int) -> None:
        """Keep the values, so that a test can read them."""


#: The metrics of this interpreter without a server.
IN_MEMORY = MetricsInMemory()


_CREATE = "Failed to create metric. "
_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)


class MetricKind(IntEnum):
    """Source: TRITONSERVER_MetricKind."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_NAMES: dict[MetricKind, ServiceKind] = {
    MetricKind.COUNTER: "counter",
    MetricKind.GAUGE: "gauge",
    MetricKind.HISTOGRAM: "histogram",
}


class MetricFamily:
    """Metrics of one name and kind, with different labels.

    It is on the page until its last reference is dropped, which also deletes its metrics.
    """

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    __slots__ = ("__weakref__", "_handle", "_kind", "_metrics", "_store")

    def __init__(self, name: Text, description: Text, kind: int) -> None:
        """Raises `TritonModelException` for a name that the page cannot have, or that has another kind there."""
        self._handle: int | None = None
        self._metrics: WeakSet[Metric] = WeakSet()
        runtime = runtimes.current()
        services = None if runtime is None else runtime.services
        self._store: MetricStore = IN_MEMORY if services is None else services
        self._kind = choice(kind, MetricKind, "the kind of a MetricFamily")
        named, described = lines(name, "the name of a MetricFamily"), lines(description, "the description")
        try:
            self._handle = self._store.metric_family(named, described, _NAMES[self._kind])
        except HeadraceError as error:
            raise TritonModelException(f"Error when creating MetricFamily: {error}") from error

    def Metric(  # noqa: N802  # Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric of this family with ``labels``. ``buckets`` are a histogram's upper bounds, ascending.

        Raises `TritonModelException`.
        """
        metric = Metric(self, _labels(labels), _buckets(self._kind, buckets))
        self._metrics.add(metric)
        return metric

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be exiting
            for metric in self._metrics:
                metric._release()
        if self._handle is not None:
            _release_handle(self._store, self._handle)


class Metric:
    """One number of a family, or one distribution. `MetricFamily.Metric` creates it; the family must outlive it."""

    __slots__ = ("__weakref__", "_handle", "_store")

    def __init__(self, family: MetricFamily, labels: Mapping[str, str], buckets: Sequence[float] | None) -> None:
        self._handle: int | None = None
        self._store = family._store
        assert family._handle is not None
        try:
            self._handle = self._store.metric(family._handle, labels, buckets)
        except HeadraceError as error:
            raise TritonModelException(f"{_CREATE}{error}") from error

    def increment(self, value: float) -> None:
        """Add ``value``, for a counter 0 or more. Raises `TritonModelException`."""
        self._update("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge. Raises `TritonModelException`."""
        self._update("set", value)

    def observe(self, value: float) -> None:
        """Count ``value`` into a histogram. Raises `TritonModelException`."""
        self._update("observe", value)

    def value(self) -> float:
        """Return the value of a counter or a gauge. Raises `TritonModelException` for a histogram."""
        if self._handle is None:
            raise TritonModelException(f"Failed to get metric value: {_DELETED}")
        try:
            return self._store.metric_value(self._handle)
        except HeadraceError as error:
            raise TritonModelException(f"Failed to get metric value: {error}") from error

    def __del__(self) -> None:
        self._release()

    def _update(self, operation: MetricOperation, value: float) -> None:
        amount = real_number(value, f"the value of {operation}()")
        if self._handle is None:
            raise TritonModelException(f"Failed to {operation} metric value: {_DELETED}")
        try:
            self._store.update_metric(self._handle, operation, amount)
        except HeadraceError as error:
            raise TritonModelException(f"Failed to {operation} metric value: {error}") from error

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            _release_handle(self._store, handle)


def _labels(labels: object) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException(f"{_CREATE}Labels must be a dictionary.")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TritonModelException(
                f"{_CREATE}Labels must be a dictionary of str to str, found {name!r}: {value!r}."
            )
    return dict(labels)


def _buckets(kind: MetricKind, buckets: object) -> list[float] | None:
    if buckets is None:
        if kind is MetricKind.HISTOGRAM:
            raise TritonModelException(f"{_CREATE}Missing required buckets.")
        return None
    if not isinstance(buckets, list):
        raise TritonModelException(f"{_CREATE}Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM:
        raise TritonModelException(f"{_CREATE}Unexpected buckets found.")
    try:
        bounds = [real_number(bound, "a bucket") for bound in buckets]
    except TypeError:
        bounds = [nan]
    if any(not a < b for a, b in pairwise((-inf, *bounds))):
        raise TritonModelException(f"{_CREATE}Buckets must be numbers in ascending order, found {buckets}.")
    return bounds[:-1] if bounds and bounds[-1] == inf else bounds  # every histogram has the bound +Inf


def _release_handle(store: MetricStore, handle: int) -> None:
    """Release a dropped object. Ignores errors, since the interpreter may be exiting."""
    with suppress(Exception):
        store.release(handle)
