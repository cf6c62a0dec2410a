"""Metrics of pb_utils, with a server and without; texts are those of a real Triton 2.51."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils.metrics import MetricsInMemory

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices
    from triton_python_backend_utils.runtime import Runtime

COUNTER, GAUGE, HISTOGRAM = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM
_numbers = itertools.count()


@pytest.fixture(params=["server", "alone"])
def family(request: pytest.FixtureRequest) -> Callable[[int], pb_utils.MetricFamily]:
    """Makes families, of a model of a server and where there is none."""
    if request.param == "server":
        request.getfixturevalue("runtime")
    return lambda kind: pb_utils.MetricFamily(f"family_{next(_numbers)}", "what it counts", kind)


def test_counter_and_gauge_keep_their_values(family: Callable[[int], pb_utils.MetricFamily]) -> None:
    counters, gauges = family(COUNTER), family(GAUGE)
    counter = counters.Metric({"model": "a"})
    counter.increment(2)
    counter.increment(0.5)
    assert counter.value() == 2.5

    gauge = gauges.Metric()
    gauge.set(3)
    gauge.increment(-1)
    assert gauge.value() == 2.0


def test_histogram_takes_observations(family: Callable[[int], pb_utils.MetricFamily]) -> None:
    histograms = family(HISTOGRAM)
    histogram = histograms.Metric({"a": "b"}, [1, 2.5])
    histogram.observe(1.5)
    with pytest.raises(pb_utils.TritonModelException, match=r"^Failed to get metric value: "):
        histogram.value()


def test_equal_labels_are_one_metric(family: Callable[[int], pb_utils.MetricFamily]) -> None:
    counters = family(COUNTER)
    one, same, other = (counters.Metric(labels) for labels in ({"a": "1"}, {"a": "1"}, {"a": "2"}))
    one.increment(4)
    assert (same.value(), other.value()) == (4, 0)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (COUNTER, {"labels": [1]}, "Failed to create metric. Labels must be a dictionary."),
        (
            COUNTER,
            {"labels": {"a": 1}},
            "Failed to create metric. Labels must be a dictionary of str to str, found 'a'",
        ),
        (COUNTER, {"labels": {1: "a"}}, "Failed to create metric. Labels must be a dictionary of str to str, found 1:"),
        (HISTOGRAM, {}, "Failed to create metric. Missing required buckets."),
        (HISTOGRAM, {"buckets": {"a": 1}}, "Failed to create metric. Buckets must be a list."),
        (HISTOGRAM, {"buckets": [2.0, 1.0]}, "Failed to create metric. Buckets must be numbers in ascending order"),
        (HISTOGRAM, {"buckets": ["a"]}, "Failed to create metric. Buckets must be numbers in ascending order"),
        (GAUGE, {"buckets": [1.0]}, "Failed to create metric. Unexpected buckets found."),
    ],
)
def test_invalid_metrics_are_refused(
    family: Callable[[int], pb_utils.MetricFamily], kind: int, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(pb_utils.TritonModelException) as refusal:
        family(kind).Metric(**arguments)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize(
    ("kind", "operation", "value", "text"),
    [
        (
            COUNTER,
            "increment",
            -1,
            "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically "
            "by non-negative values.",
        ),
        (
            COUNTER,
            "observe",
            1,
            "Failed to observe metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Obs",
        ),
        (COUNTER, "set", 1, "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (
            GAUGE,
            "observe",
            1,
            "Failed to observe metric value: TRITONSERVER_METRIC_KIND_GAUGE does not support Observe",
        ),
    ],
)
def test_operation_that_does_not_fit_the_kind_is_refused(
    family: Callable[[int], pb_utils.MetricFamily], kind: int, operation: str, value: float, text: str
) -> None:
    of_kind = family(kind)
    metric = of_kind.Metric({})
    with pytest.raises(pb_utils.TritonModelException) as refusal:
        getattr(metric, operation)(value)
    assert str(refusal.value).startswith(text)
    assert metric.value() == 0


@pytest.mark.parametrize("value", ["1", b"1", None, [1], 1j])
def test_a_value_that_is_no_number_is_refused(family: Callable[[int], pb_utils.MetricFamily], value: Any) -> None:
    counted = family(COUNTER)
    counter = counted.Metric()
    with pytest.raises(TypeError, match=r"the value of increment\(\) must be a number, found type"):
        counter.increment(value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64(1.5),
        np.float16(1.5),
        np.longdouble(1.5),
        np.array(1.5),
        np.array([1.5]),
        Decimal("1.5"),
        Fraction(3, 2),
    ],
)
def test_a_number_of_any_make_is_a_value(family: Callable[[int], pb_utils.MetricFamily], value: Any) -> None:
    gauges, histograms = family(GAUGE), family(HISTOGRAM)
    gauge = gauges.Metric()
    gauge.set(value)
    gauge.increment(value)
    assert gauge.value() == 3.0
    assert type(gauge.value()) is float
    histograms.Metric(buckets=[value, np.int64(2), float("inf")]).observe(value)


def test_names_and_descriptions_may_be_bytes(runtime: Runtime, services: FunctionServices) -> None:
    pb_utils.MetricFamily(b"in_bytes", b"what it counts", COUNTER).Metric({"a": "b"})
    assert ("in_bytes", (("a", "b"),)) in services.metrics


def test_family_is_one_kind_only(family: Callable[[int], pb_utils.MetricFamily]) -> None:
    family(COUNTER)
    name = f"family_{next(_numbers) - 1}"
    pb_utils.MetricFamily(name, "as it is", COUNTER)
    with pytest.raises(pb_utils.TritonModelException, match=f"^Error when creating MetricFamily: .*{name}"):
        pb_utils.MetricFamily(name, "as another", GAUGE)


@pytest.mark.parametrize("kind", [9, None, "COUNTER", 1.0])
def test_unknown_kind_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="the kind of a MetricFamily must be"):
        pb_utils.MetricFamily("f", "d", kind)


@pytest.mark.parametrize(
    ("kind", "operation", "arguments"),
    [(COUNTER, "increment", (1,)), (GAUGE, "set", (1,)), (HISTOGRAM, "observe", (1,)), (COUNTER, "value", ())],
)
def test_a_metric_of_a_deleted_family_is_refused(
    family: Callable[[int], pb_utils.MetricFamily], kind: int, operation: str, arguments: tuple[int, ...]
) -> None:
    metric = family(kind).Metric({"a": "b"}, [1.0] if kind == HISTOGRAM else None)
    with pytest.raises(pb_utils.TritonModelException) as refusal:
        getattr(metric, operation)(*arguments)
    doing = "get" if operation == "value" else operation
    assert str(refusal.value) == (
        f"Failed to {doing} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been "
        "deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
        "deleted."
    )


def test_a_dropped_family_releases_its_metrics_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(MetricsInMemory, "release", lambda self, handle: released.append(handle))
    family = pb_utils.MetricFamily("dropped", "d", GAUGE)
    metric, deleted = family.Metric({"a": "b"}), family.Metric({"a": "c"})
    del deleted
    assert len(released) == 1
    del family
    assert len(released) == 3
    del metric
    assert len(released) == 3
