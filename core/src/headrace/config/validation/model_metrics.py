"""Rules of ``model_metrics`` (docs/spec/behaviours.md section 4.11). Whether a family exists is not among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from headrace.config.model_config_pb2 import ModelConfig, ModelMetrics
from headrace.config.validation.problem import Problem


def check(config: ModelConfig) -> Iterator[Problem]:
    """What every ``metric_control`` must say."""
    for index, control in enumerate(config.model_metrics.metric_control):
        yield from _check_control(control, f"model_metrics.metric_control[{index}]", config.name)


def _check_control(control: ModelMetrics.MetricControl, field: str, model: str) -> Iterator[Problem]:
    family = control.metric_identifier.family
    if not control.HasField("metric_identifier"):
        yield Problem(f"{field}.metric_identifier", "metric control must specify 'metric_identifier'")
    elif not family:
        yield Problem(f"{field}.metric_identifier.family", "metric identifier must specify non-empty 'family'")
    if not control.HasField("histogram_options"):
        yield Problem(f"{field}.histogram_options", "metric control must specify 'histogram_options'")
        return
    field = f"{field}.histogram_options.buckets"
    buckets = control.histogram_options.buckets
    if not buckets:
        yield Problem(field, "histogram options must specify non-empty 'buckets'")
    elif not _is_increasing(buckets):
        yield Problem(field, f"histogram 'buckets' of metric family '{family}' must increase for {model}")


def _is_increasing(buckets: Sequence[float]) -> bool:
    """False with a NaN too, which compares with nothing."""
    return buckets[0] == buckets[0] and all(one < next_one for one, next_one in pairwise(buckets))
