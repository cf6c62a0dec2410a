"""The metrics page in the binary format of Prometheus, with native histograms: ``native_histograms=true``.

A native histogram has only the buckets that are in use, in one series. Headrace counts in buckets of powers of two
anyway, which are the buckets of schema 0. So nothing is counted twice, and a request costs nothing more.

Source: https://prometheus.io/docs/specs/native_histograms/. A histogram with other bounds keeps its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from prometheus_client import Metric
from prometheus_client.samples import Sample

from headrace_http import prometheus_metrics_pb2 as pb

CONTENT_TYPE = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
_WORDS = frozenset((b"proto=io.prometheus.client.metricfamily", b"encoding=delimited"))
#: The threshold of a bucket for zeros, which stays empty. Without it, a histogram with no samples would not be native.
_ZERO_THRESHOLD = 2.0**-128
_KINDS = {"counter": pb.COUNTER, "gauge": pb.GAUGE, "summary": pb.SUMMARY, "histogram": pb.HISTOGRAM}


def is_accepted(accept: bytes) -> bool:
    """True if the header ``Accept`` has this format, with a weight that is not 0."""
    for entry in accept.lower().split(b","):
        kind, *words = (word.strip().replace(b'"', b"") for word in entry.split(b";"))
        if kind == b"application/vnd.google.protobuf" and _WORDS.issubset(words):
            return not any(word.startswith(b"q=0") and not word.strip(b"q=0.") for word in words)
    return False


def write(families: Iterable[Metric]) -> bytes:
    """Return the families that have samples, each behind its length."""
    return b"".join(part for family in families if family.samples for part in _delimited(_family(family)))


def _delimited(message: pb.MetricFamily) -> tuple[bytes, bytes]:
    data = message.SerializeToString()
    left, head = len(data), bytearray()
    while left > 127:
        head.append(left & 127 | 128)
        left >>= 7
    head.append(left)
    return bytes(head), data


def _family(family: Metric) -> pb.MetricFamily:
    message = pb.MetricFamily(name=family.name, help=family.documentation, type=_KINDS.get(family.type, pb.UNTYPED))
    if family.type in ("histogram", "summary"):
        for labels, samples in series(family):
            made = message.metric.add(label=_labels(labels))
            (_fill_histogram if family.type == "histogram" else _fill_summary)(made, samples)
        return message
    field = family.type if family.type in _KINDS else "untyped"
    for sample in family.samples:
        made = message.metric.add(label=_labels(sample.labels.items()))
        getattr(made, field).value = sample.value
    return message


def _labels(labels: Iterable[tuple[str, str]]) -> Iterator[pb.LabelPair]:
    return (pb.LabelPair(name=name, value=value) for name, value in labels)


def series(family: Metric) -> Iterator[tuple[tuple[tuple[str, str], ...], list[Sample]]]:
    """Yield the labels and the samples of each series of a histogram or a summary, whose samples stand together."""
    for labels, samples in groupby(family.samples, _labels_of_series):
        yield labels, list(samples)


def _labels_of_series(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(label for label in sample.labels.items() if label[0] not in ("le", "quantile"))


def _fill_summary(made: pb.Metric, samples: Iterable[Sample]) -> None:
    for sample in samples:
        if "quantile" in sample.labels:
            made.summary.quantile.add(quantile=float(sample.labels["quantile"]), value=sample.value)
        elif sample.name.endswith("_count"):
            made.summary.sample_count = int(sample.value)
        else:
            made.summary.sample_sum = sample.value


def _fill_histogram(made: pb.Metric, samples: Iterable[Sample]) -> None:
    histogram = made.histogram
    bounds: list[float] = []
    counts: list[int] = []
    for sample in samples:
        if "le" in sample.labels:
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value))
        elif sample.name.endswith("_count"):
            histogram.sample_count = int(sample.value)
        else:
            histogram.sample_sum = sample.value
    if not are_powers_of_two(bounds):
        for bound, count in zip(bounds, counts, strict=True):
            histogram.bucket.add(upper_bound=bound, cumulative_count=count)
        return
    histogram.schema, histogram.zero_threshold, histogram.zero_count = 0, _ZERO_THRESHOLD, 0
    _fill_buckets(histogram, counts)


def are_powers_of_two(bounds: Sequence[float]) -> bool:
    """True for the bounds 1, 2, 4, ... and infinity."""
    return len(bounds) > 2 and bounds[:-1] == [float(1 << power) for power in range(len(bounds) - 1)]


def _fill_buckets(histogram: pb.Histogram, cumulative: Sequence[int]) -> None:
    """Write the buckets that have samples. Bucket n of schema 0 has the values above 2**(n-1) up to 2**n.

    Zeros are in bucket 0, and values above the last bound are in the bucket behind it: its values are longer than a
    minute, and a bucket without an upper bound would make every quantile in it infinite.
    """
    before = written = 0
    behind = 0  # the first bucket that is in no span yet
    for index, total in enumerate(cumulative):
        count, before = total - before, total
        if not count:
            continue
        if index > behind or not histogram.positive_span:
            histogram.positive_span.add(offset=index - behind, length=0)
        histogram.positive_span[-1].length += 1
        histogram.positive_delta.append(count - written)
        behind, written = index + 1, count
