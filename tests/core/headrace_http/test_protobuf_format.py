"""The binary metrics page, read back. A real Prometheus reads it in tests/deploy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace_http import prometheus_metrics_pb2 as pb
from headrace_http import protobuf_format

BOUNDS = ("1", "2", "4", "8", "16", "32", "64", "+Inf")


def read(page: bytes) -> list[pb.MetricFamily]:
    found = []
    while page:
        length = shift = 0
        while True:
            byte, page = page[0], page[1:]
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append(pb.MetricFamily.FromString(page[:length]))
        page = page[length:]
    return found


def histogram(counts: Sequence[int], bounds: Sequence[str] = BOUNDS) -> Metric:
    """Return a family with two models, of which the second has ``counts`` twice."""
    family = Metric("h", "Help", "histogram")
    for model, factor in (("a", 1), ("b", 2)):
        total = 0
        family.samples.append(Sample("h_count", {"model": model}, sum(counts) * factor))
        family.samples.append(Sample("h_sum", {"model": model}, 7.5))
        for bound, count in zip(bounds, counts, strict=True):
            total += count * factor
            family.samples.append(Sample("h_bucket", {"model": model, "le": bound}, total))
    return family


def buckets(found: pb.Histogram) -> dict[int, int]:
    """Return the count of each bucket, by the rules of https://prometheus.io/docs/specs/native_histograms/."""
    index, count, counts, deltas = 0, 0, {}, iter(found.positive_delta)
    for span in found.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            counts[index] = count
            index += 1
    assert not list(deltas)
    return counts


@pytest.mark.parametrize(
    "counts",
    [[0] * 8, [3, 0, 0, 0, 0, 0, 0, 0], [0, 0, 5, 1, 0, 0, 2, 9], [1, 2, 3, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0, 0, 4]],
)
def test_powers_of_two_are_the_buckets_of_schema_0(counts: list[int]) -> None:
    [family] = read(protobuf_format.write([histogram(counts)]))
    assert (family.name, family.help, family.type) == ("h", "Help", pb.HISTOGRAM)
    for factor, metric in enumerate(family.metric, 1):
        found = metric.histogram
        assert [(label.name, label.value) for label in metric.label] == [("model", " ab"[factor])]
        assert buckets(found) == {index: count * factor for index, count in enumerate(counts) if count}
        assert (found.sample_count, found.sample_sum, found.schema) == (sum(counts) * factor, 7.5, 0)
        assert found.zero_threshold > 0 == found.zero_count, "native also without samples"
        assert not found.bucket


@pytest.mark.parametrize("bounds", [("1", "3", "+Inf"), ("2", "4", "+Inf"), ("0", "+Inf"), ("1", "+Inf")])
def test_other_bounds_stay_buckets(bounds: tuple[str, ...]) -> None:
    counts = [1, 2, 3][: len(bounds)]
    [family] = read(protobuf_format.write([histogram(counts, bounds)]))
    found = family.metric[0].histogram
    assert [bucket.upper_bound for bucket in found.bucket] == [float(bound) for bound in bounds]
    assert [bucket.cumulative_count for bucket in found.bucket] == [1, 3, 6][: len(bounds)]
    assert not found.HasField("schema")


def test_other_kinds_keep_their_names_and_values() -> None:
    families = [Metric(f"nv_{kind}", "", kind) for kind in ("counter", "gauge", "unknown")]
    for family in families:
        family.samples.append(Sample(family.name, {"model": 'm "'}, 2.5))
    summary = Metric("s", "S" * 300, "summary")
    summary.samples += [Sample("s_count", {}, 4), Sample("s_sum", {}, 9), Sample("s", {"quantile": "0.5"}, 2)]
    counter, gauge, unknown, found = read(protobuf_format.write([*families, summary, Metric("none", "", "gauge")]))
    assert (counter.name, counter.type, counter.metric[0].counter.value) == ("nv_counter", pb.COUNTER, 2.5)
    assert (gauge.type, gauge.metric[0].gauge.value) == (pb.GAUGE, 2.5)
    assert (unknown.type, unknown.metric[0].untyped.value) == (pb.UNTYPED, 2.5)
    assert counter.metric[0].label[0].value == 'm "'
    read_summary = found.metric[0].summary
    assert (read_summary.sample_count, read_summary.sample_sum) == (4, 9)
    assert [(each.quantile, each.value) for each in read_summary.quantile] == [(0.5, 2)]


#: The header of Prometheus 2.42 with the feature, and headers of others.
@pytest.mark.parametrize(
    ("accept", "is_accepted"),
    [
        (
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
            "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
        ('application/vnd.google.protobuf; proto="io.prometheus.client.MetricFamily"; encoding=delimited; q=0.7', True),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0", False),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.000", False),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=text", False),
        ("application/vnd.google.protobuf", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1", False),
        ("*/*", False),
        ("", False),
        (";;,;=,", False),
    ],
)
def test_protobuf_is_for_clients_that_name_it(accept: str, is_accepted: bool) -> None:
    assert protobuf_format.is_accepted(accept.encode()) is is_accepted
