"""The sums of several servers' metrics: right totals, and no counter that falls."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace_cli.server_processes.metric_sums import Family, MetricSums, read_families, write_families
from headrace_http.text_format import text

NAME = "nv_inference_request_success"


def family(value: float, kind: str = "counter", name: str = NAME, **labels: str) -> Family:
    """One series."""
    metric = Metric(name, "What it is", kind)
    metric.samples.append(Sample(name, labels or {"model": "m"}, value))
    (family,) = read_families(json.loads(json.dumps(write_families([metric]))))
    return family


def histogram(*counts: float) -> Family:
    """Cumulative, with the bounds 1, 2, ... and +Inf."""
    metric = Metric("h", "What it is", "histogram")
    metric.samples += [Sample("h_count", {"model": "m"}, counts[-1]), Sample("h_sum", {"model": "m"}, 10 * counts[-1])]
    bounds = [*map(str, range(1, len(counts))), "+Inf"]
    metric.samples += [Sample("h_bucket", {"model": "m", "le": le}, n) for le, n in zip(bounds, counts, strict=True)]
    (family,) = read_families(write_families([metric]))
    return family


def values(sums: MetricSums, name: str = NAME) -> list[float]:
    return [sample.value for metric in sums.collect() if metric.name == name for sample in metric.samples]


def test_families_that_are_written_and_read_print_the_same_page() -> None:
    metric = Metric(NAME, 'A "text"\n', "counter")
    metric.samples += [Sample(NAME, {"model": "a", "_tag": "ü"}, 3), Sample(NAME, {"model": "b", "_tag": ""}, 2.5)]
    sums = MetricSums()
    sums.read(0, read_families(json.loads(json.dumps(write_families([metric, Metric("empty", "", "gauge")])))))
    assert text(sums.collect()) == text([metric])


def test_counters_of_all_servers_are_added_up() -> None:
    sums = MetricSums()
    sums.read(0, [family(3), family(7, name="other_total")])
    sums.read(1, [family(4)])
    assert values(sums) == [7]
    assert values(sums, "other_total") == [7]


def test_series_with_other_labels_stay_apart() -> None:
    sums = MetricSums()
    sums.read(0, [family(3, model="a")])
    sums.read(1, [family(4, model="b")])
    assert values(sums) == [3, 4]


def test_counts_of_a_server_that_has_exited_stay() -> None:
    sums = MetricSums()
    sums.read(0, [family(3)])
    sums.read(1, [family(4)])
    sums.ended(0)
    assert values(sums) == [7]
    sums.read(0, [family(5)])  # which arrived after it
    assert values(sums) == [12]


def test_counts_stay_when_all_servers_have_exited() -> None:
    sums = MetricSums()
    sums.read(0, [family(3)])
    sums.ended(0)
    assert values(sums) == []
    sums.read(0, [family(1)])
    assert values(sums) == [4]


def test_a_counter_that_falls_has_restarted() -> None:
    """Its model has been loaded again, in one server and not yet in the other."""
    sums = MetricSums()
    sums.read(0, [family(100)])
    sums.read(1, [family(100)])
    sums.read(0, [family(2)])
    assert values(sums) == [202]


def test_a_histogram_restarts_as_a_whole() -> None:
    sums = MetricSums()
    sums.read(0, [histogram(2, 100)])
    sums.read(0, [histogram(2, 3)])
    (metric,) = sums.collect()
    samples = {sample.name + sample.labels.get("le", ""): sample.value for sample in metric.samples}
    assert samples == {"h_count": 103, "h_sum": 1030, "h_bucket1": 4, "h_bucket+Inf": 103}


def test_a_model_that_no_server_has_any_more_is_off_the_page_and_begins_with_nothing() -> None:
    sums = MetricSums()
    for number in (0, 1):
        sums.read(number, [family(5)])
    sums.read(0, [])
    assert values(sums) == [10]
    sums.read(1, [])
    assert values(sums) == []
    sums.read(0, [family(1)])
    assert values(sums) == [1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nv_inference_pending_request_count", [5]), ("nv_model_load_duration_secs", [3]), ("headrace_entries", [5])],
)
def test_gauges_of_the_servers_own_are_added_up_but_for_load_times(name: str, expected: list[float]) -> None:
    sums = MetricSums()
    for number, value in enumerate((3, 2)):
        sums.read(number, [family(value, "gauge", name)])
    assert values(sums, name) == expected
    sums.ended(0)
    assert values(sums, name) == [2]


def test_a_gauge_that_a_model_has_made_has_a_series_for_each_server() -> None:
    sums = MetricSums()
    for number, value in enumerate((20.5, 21.5)):
        sums.read(number, [family(value, "gauge", "temperature", model="m")])
    (metric,) = sums.collect()
    assert [(sample.labels, sample.value) for sample in metric.samples] == [
        ({"model": "m", "headrace_worker": "0"}, 20.5),
        ({"model": "m", "headrace_worker": "1"}, 21.5),
    ]


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["count", "read", "die"]), st.integers(0, 9)))


@given(STEPS)
def test_the_sum_has_the_last_measurement_of_each_server_and_never_falls(
    steps: Sequence[tuple[int, str, int]],
) -> None:
    """Compare with a simulation that has the count of each run of each server."""
    sums, lives, reported, shown = MetricSums(), [0, 0, 0], [0, 0, 0], 0.0
    lost = 0  # counted by servers that have exited, and measured before
    for number in range(3):
        sums.read(number, [family(0)])
    for number, step, amount in steps:
        if step == "count":
            lives[number] += amount
        elif step == "read":
            sums.read(number, [family(lives[number])])
            reported[number] = lives[number]
        else:
            sums.ended(number)
            lost, lives[number], reported[number] = lost + reported[number], 0, 0
            sums.read(number, [family(0)])
        (total,) = values(sums)
        assert total == lost + sum(reported)
        assert total >= shown
        shown = total
