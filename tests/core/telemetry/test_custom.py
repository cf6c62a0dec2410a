"""Metrics of models. Texts, and what a page looks like, are a real Triton 2.51's for the same calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.errors import AlreadyExists, HeadraceError, InternalError, InvalidArgument, Unsupported
from headrace.telemetry.custom import CustomMetrics, InstanceMetrics
from headrace.telemetry.series import MetricKind, MetricOperation
from headrace_http import text_format

if TYPE_CHECKING:
    from tests.core.conftest import Interrupted


def page(metrics: CustomMetrics) -> str:
    return text_format.text(metrics.collect())


@pytest.fixture
def metrics() -> CustomMetrics:
    return CustomMetrics()


def test_the_page_shows_each_kind_as_triton_does(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    counter = instance.metric(
        instance.family("c_total", 'counts \\ "x"\nline', "counter"), {"a": "1", "Z": 'q"\n'}, None
    )
    gauge = instance.metric(instance.family("g_now", "g", "gauge"), {}, None)
    histogram = instance.metric(instance.family("h_secs", "h", "histogram"), {"k": "v"}, [0.1, 1.0, 10])
    instance.update(counter, "increment", 2.5)
    instance.update(gauge, "set", -3)
    instance.update(gauge, "increment", -2)
    for value in (0.5, 1.0, 100):
        instance.update(histogram, "observe", value)
    assert page(metrics) == (
        '# HELP c_total counts \\\\ "x"\\nline\n'
        "# TYPE c_total counter\n"
        'c_total{Z="q\\"\\n",a="1"} 2.5\n'
        "# HELP g_now g\n"
        "# TYPE g_now gauge\n"
        "g_now -5\n"
        "# HELP h_secs h\n"
        "# TYPE h_secs histogram\n"
        'h_secs_count{k="v"} 3\n'
        'h_secs_sum{k="v"} 101.5\n'
        'h_secs_bucket{k="v",le="0.1"} 0\n'
        'h_secs_bucket{k="v",le="1"} 2\n'
        'h_secs_bucket{k="v",le="10"} 2\n'
        'h_secs_bucket{k="v",le="+Inf"} 3\n'
    )
    names = {family.name for family in text_string_to_metric_families(page(metrics))}
    assert names == {"c", "g_now", "h_secs"}  # prometheus-client omits `_total`


def test_a_histogram_may_have_no_buckets_of_its_own(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    instance.update(instance.metric(instance.family("h", "", "histogram"), {}, []), "observe", 3)
    assert 'h_bucket{le="+Inf"} 1\n' in page(metrics)


def test_a_histogram_with_negative_bounds_has_a_sum(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    histogram = instance.metric(instance.family("h", "", "histogram"), {}, [-1, 10_000_000])
    for value in (-2, 0.5):
        instance.update(histogram, "observe", value)
    assert page(metrics).splitlines()[2:] == [
        "h_count 2",
        "h_sum -1.5",
        'h_bucket{le="-1"} 1',
        'h_bucket{le="10000000"} 2',
        'h_bucket{le="+Inf"} 2',
    ]


def test_the_time_of_creation_is_not_on_the_page_unless_a_model_has_a_metric_of_that_name(
    metrics: CustomMetrics,
) -> None:
    instance = InstanceMetrics(metrics)
    instance.metric(instance.family("c", "", "counter"), {}, None)
    instance.metric(instance.family("h", "", "histogram"), {}, [1.0])
    assert "_created" not in page(metrics)
    instance.update(instance.metric(instance.family("files_created", "", "gauge"), {}, None), "set", 7)
    assert page(metrics).endswith("files_created 7\n")


def test_equal_names_and_labels_are_one_metric_until_the_last_instance_releases_it(metrics: CustomMetrics) -> None:
    one, other = InstanceMetrics(metrics), InstanceMetrics(metrics)
    mine = one.metric(one.family("c", "first", "counter"), {"a": "1", "b": "2"}, None)
    theirs = other.metric(other.family("c", "second", "counter"), {"b": "2", "a": "1"}, None)
    one.update(mine, "increment", 1)
    other.update(theirs, "increment", 2)
    assert one.value(mine) == other.value(theirs) == 3
    assert page(metrics) == '# HELP c first\n# TYPE c counter\nc{a="1",b="2"} 3\n'
    one.close()
    assert 'c{a="1",b="2"} 3\n' in page(metrics)
    other.close()
    assert page(metrics) == ""


def test_a_metric_that_is_created_again_starts_at_zero(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    metric = instance.metric(instance.family("c", "", "counter"), {}, None)
    instance.update(metric, "increment", 5)
    instance.close()
    assert instance.value(instance.metric(instance.family("c", "", "gauge"), {}, None)) == 0


def test_a_family_lives_as_long_as_its_metrics(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    family = instance.family("c", "", "counter")
    metric = instance.metric(family, {}, None)
    instance.release(family)
    instance.update(metric, "increment", 1)
    assert "c 1\n" in page(metrics)
    instance.release(metric)
    assert page(metrics) == ""


def test_handle_that_was_released_or_never_existed_is_ignored(metrics: CustomMetrics) -> None:
    instance, other = InstanceMetrics(metrics), InstanceMetrics(metrics)
    family = instance.family("c", "", "counter")
    metric, other_metric = instance.metric(family, {}, None), other.metric(other.family("c", "", "counter"), {}, None)
    for handle in (metric, metric, 12345):
        instance.release(handle)
    other.update(other_metric, "increment", 1)
    assert "c 1\n" in page(metrics)
    with pytest.raises(InternalError, match=r"^the metric has been released$"):
        instance.update(metric, "increment", 1)
    instance.release(family)
    with pytest.raises(InternalError, match=r"^the metric family has been released$"):
        instance.metric(family, {}, None)


@pytest.mark.parametrize("name", ["", "1x", "a-b", "a b", "ü", "a\n", 'a{x="1"} 5\nb'])
def test_a_name_that_would_spoil_the_page_is_refused(metrics: CustomMetrics, name: str) -> None:
    with pytest.raises(InvalidArgument, match="metric family name "):
        metrics.family(name, "", "counter")


@pytest.mark.parametrize(
    "name",
    ["nv_inference_count", "nv_model_load_duration_secs", "nv_gpu_utilization", "nv_cpu_x", "nv_cache_x", "headrace_x"],
)
def test_the_servers_own_names_are_refused_and_others_of_their_kind_are_not(metrics: CustomMetrics, name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"^metric family name '{name}': names with this prefix are reserved for the server$"
    ):
        metrics.family(name, "", "counter")
    metrics.family("nv_trt_llm_request_metrics", "", "gauge")


@pytest.mark.parametrize("labels", [{"a-b": "1"}, {"": "1"}, {"__a": "1"}, {"1a": "1"}, {"a\n": "1"}, {"a": 1}])
def test_a_label_that_would_spoil_the_page_is_refused(metrics: CustomMetrics, labels: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="metric family 'c': label "):
        metrics.metric(metrics.family("c", "", "counter"), labels, None)


def test_a_histogram_has_its_le_itself(metrics: CustomMetrics) -> None:
    with pytest.raises(InvalidArgument, match="'le' is reserved in histograms"):
        metrics.metric(metrics.family("h", "", "histogram"), {"le": "1"}, [1.0])
    metrics.metric(metrics.family("c", "", "counter"), {"le": "1"}, None)


def test_families_whose_samples_would_share_a_name_are_refused(metrics: CustomMetrics) -> None:
    metrics.family("h", "", "histogram")
    metrics.family("x_sum", "", "counter")
    for name, kind in (("h_count", "counter"), ("x", "histogram")):
        with pytest.raises(AlreadyExists, match="would clash with"):
            metrics.family(name, "", kind)  # type: ignore[arg-type]
    with pytest.raises(AlreadyExists, match=r"^Family name already exists with different type: 'h' is a histogram$"):
        metrics.family("h", "", "gauge")


@pytest.mark.parametrize(
    ("kind", "buckets", "message"),
    [
        ("histogram", None, "Bucket boundaries not found in Metric args."),
        ("histogram", [2.0, 1.0], "Bucket Boundaries must be strictly sorted"),
        ("histogram", [1.0, 1.0], "Bucket Boundaries must be strictly sorted"),
        ("histogram", [1.0, float("nan")], "Bucket Boundaries must be strictly sorted"),
        ("histogram", [1.0, float("inf")], "Bucket Boundaries must be strictly sorted"),
        ("counter", [1.0], "Unexpected args found in counter Metric constructor."),
        ("gauge", [], "Unexpected args found in gauge Metric constructor."),
    ],
)
def test_buckets_belong_to_histograms_and_ascend(
    metrics: CustomMetrics, kind: MetricKind, buckets: list[float] | None, message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        metrics.metric(metrics.family("m", "", kind), {}, buckets)
    assert caught.value.message.startswith(message)


COUNTER, GAUGE, HISTOGRAM = (f"TRITONSERVER_METRIC_KIND_{kind}" for kind in ("COUNTER", "GAUGE", "HISTOGRAM"))


@pytest.mark.parametrize(
    ("kind", "operation", "message"),
    [
        ("counter", "set", f"{COUNTER} does not support Set"),
        ("counter", "observe", f"{COUNTER} does not support Observe"),
        ("gauge", "observe", f"{GAUGE} does not support Observe"),
        ("histogram", "increment", f"{HISTOGRAM} does not support Increment"),
        ("histogram", "set", f"{HISTOGRAM} does not support Set"),
    ],
)
def test_an_operation_of_another_kind_is_unsupported(
    metrics: CustomMetrics, kind: MetricKind, operation: MetricOperation, message: str
) -> None:
    series = metrics.metric(metrics.family("m", "", kind), {}, [1.0] if kind == "histogram" else None)
    with pytest.raises(Unsupported) as caught:
        series.update(operation, 1)
    assert caught.value.message == message


def test_a_histogram_has_no_one_value(metrics: CustomMetrics) -> None:
    with pytest.raises(Unsupported, match=f"^{HISTOGRAM} does not support Value$"):
        metrics.metric(metrics.family("h", "", "histogram"), {}, [1.0]).value()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("-inf")])
def test_a_counter_never_decreases(metrics: CustomMetrics, value: float) -> None:
    counter = metrics.metric(metrics.family("c", "", "counter"), {}, None)
    counter.update("increment", 2)
    with pytest.raises(InvalidArgument) as caught:
        counter.update("increment", value)
    assert caught.value.message == (f"{COUNTER} can only be incremented monotonically by non-negative values.")
    assert counter.value() == 2


def test_no_increment_is_lost_and_nothing_is_left_among_many_threads(metrics: CustomMetrics) -> None:
    instance = InstanceMetrics(metrics)
    counter = instance.metric(instance.family("c", "", "counter"), {}, None)
    problems: list[HeadraceError] = []

    def work() -> None:
        try:
            for _ in range(300):
                thread_metrics = InstanceMetrics(metrics)
                mine = thread_metrics.metric(thread_metrics.family("c", "", "counter"), {}, None)
                passing = thread_metrics.metric(thread_metrics.family("passing", "", "histogram"), {"a": "b"}, [1.0])
                thread_metrics.update(mine, "increment", 1)
                thread_metrics.update(passing, "observe", 1)
                page(metrics)
                thread_metrics.close()
        except HeadraceError as error:
            problems.append(error)

    run_together(work, 8)
    assert problems == []
    assert instance.value(counter) == 2400
    instance.close()
    assert page(metrics) == ""


def run_together(work: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_a_finalizer_may_release_a_metric_in_the_middle_of_any_call(
    metrics: CustomMetrics, interrupted: Interrupted
) -> None:
    instance = InstanceMetrics(metrics)
    doomed: list[int] = []

    def call() -> None:
        finalize()
        assert page(metrics) == ""
        family = instance.family("g", "", "gauge")
        doomed.append(instance.metric(family, {"a": "1"}, None))
        metric = instance.metric(family, {"a": "1"}, None)
        instance.release(metric)
        instance.release(family)
        list(metrics.collect())

    def finalize() -> None:
        with suppress(IndexError):
            instance.release(doomed.pop())

    assert interrupted(call, finalize) > 50
