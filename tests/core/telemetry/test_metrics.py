"""The oracle is a page recorded from Triton, prometheus-client's parser, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes, Duration
from headrace.telemetry.exposition import MetricsSettings
from headrace.telemetry.metrics import ModelCollector
from headrace.telemetry.statistics import ModelStatistics, Snapshot
from headrace.telemetry.summaries import Summaries
from headrace_http import text_format
from tests.core.conftest import make_ticket

TRITON_PAGE = (Path(__file__).parent / "triton.prom").read_text()
US = 1000
MODEL = {"model": "simple", "version": "1"}


@dataclass(eq=False)
class Model:
    name: str = "simple"
    version: int = 1
    config: ModelConfig = field(default_factory=ModelConfig)
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    pending: int = 0

    def snapshot(self) -> Snapshot:
        return self.statistics.snapshot(self.pending)


def ticket(rows: int, arrival_us: int, queued_us: int) -> Ticket:
    ticket = make_ticket("simple", arrival_ns=arrival_us * US)
    ticket.rows, ticket.queued_ns = rows, queued_us * US
    return ticket


@pytest.fixture
def model() -> Model:
    """One batch of two requests, 3 and 1 rows; one request that the backend failed."""
    model = Model()
    succeeded = [ticket(3, 100, 110), ticket(1, 200, 220)]
    times = BatchTimes(300 * US, 310 * US, 360 * US, 365 * US)
    model.statistics.for_instance().record(succeeded, [ticket(1, 150, 160)], times)
    return model


def page(*models: Model, settings: MetricsSettings | None = None, summaries: Summaries | None = None) -> str:
    return text_format.text(ModelCollector(lambda: models, settings or MetricsSettings(), summaries).collect())


def parse(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str) -> dict[str, float]:
    """The samples that have no label but model and version."""
    samples = [sample for family in parse(text).values() for sample in family.samples if sample.labels == MODEL]
    return {sample.name.removesuffix("_total"): sample.value for sample in samples}  # the parser's own suffix


def test_page_of_an_idle_model_starts_with_the_lines_of_the_specification() -> None:
    lines = page(Model()).splitlines()
    assert lines[:2] == [
        "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
        "# TYPE nv_inference_request_success counter",
    ]
    assert 'nv_inference_request_success{model="simple",version="1"} 0' in lines
    assert "# TYPE nv_inference_request_failure counter" in lines
    assert 'nv_inference_request_failure{model="simple",reason="REJECTED",version="1"} 0' in lines
    assert 'nv_inference_pending_request_count{model="simple",version="1"} 0' in lines


def test_names_types_and_help_texts_are_those_of_triton() -> None:
    ours = page(Model(), settings=MetricsSettings(summary_latencies=True), summaries=Summaries()).splitlines()
    theirs = [line for line in TRITON_PAGE.splitlines() if line.startswith("#") and " nv_inference_" in line]
    assert theirs
    assert [line for line in theirs if line not in ours] == []


def test_counters_add_up_requests_rows_executions_and_microseconds(model: Model) -> None:
    samples = values(page(model))
    assert samples["nv_inference_request_success"] == 2
    assert samples["nv_inference_count"] == 4
    assert samples["nv_inference_exec_count"] == 1
    assert samples["nv_inference_request_duration_us"] == (365 - 100) + (365 - 200)
    assert samples["nv_inference_queue_duration_us"] == (300 - 110) + (300 - 220)
    assert samples["nv_inference_compute_input_duration_us"] == 2 * 10
    assert samples["nv_inference_compute_infer_duration_us"] == 2 * 50
    assert samples["nv_inference_compute_output_duration_us"] == 2 * 5


def test_each_reason_of_failure_has_its_series(model: Model) -> None:
    model.statistics.rejected = Duration(3, 0)
    model.statistics.cancelled = Duration(4, 0)
    model.statistics.other_failures = Duration(5, 0)
    samples = parse(page(model))["nv_inference_request_failure"].samples
    assert {sample.labels["reason"]: sample.value for sample in samples} == {
        "REJECTED": 3,
        "CANCELED": 4,
        "BACKEND": 1,
        "OTHER": 5,
    }


def test_gauges_show_the_queue_depth_and_the_load_time() -> None:
    samples = values(page(Model(statistics=ModelStatistics(load_ns=1_500_000_000), pending=7)))
    assert samples["nv_inference_pending_request_count"] == 7
    assert samples["nv_model_load_duration_secs"] == 1.5


def test_metric_tags_become_labels_in_order_of_their_names(model: Model) -> None:
    model.config = ModelConfig(metric_tags={"team": "a", "Area": "b", "not a name": "c"})
    lines = page(model).splitlines()
    tags = '_Area="b",_not_a_name="c",_team="a"'
    assert f'nv_inference_count{{{tags},model="simple",version="1"}} 4' in lines
    assert f'nv_inference_request_failure{{{tags},model="simple",reason="BACKEND",version="1"}} 1' in lines


def test_histograms_are_cumulative_and_end_with_the_count(model: Model) -> None:
    families = parse(page(model))
    for name, total, count in (
        ("nv_inference_request_histogram_us", 265 + 165, 2),
        ("nv_inference_queue_histogram_us", 190 + 80, 2),
        ("nv_inference_compute_infer_histogram_us", 50, 1),
        ("nv_inference_batch_size_histogram", 4, 1),
    ):
        samples = families[name].samples
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert dict(buckets)[float("inf")] == count
        assert {s.name: s.value for s in samples if s.labels == MODEL} == {f"{name}_count": count, f"{name}_sum": total}


def test_a_duration_is_counted_in_the_bucket_whose_bound_it_does_not_exceed(model: Model) -> None:
    samples = parse(page(model))["nv_inference_request_histogram_us"].samples
    at = {sample.labels.get("le"): sample.value for sample in samples}
    assert (at["128"], at["256"], at["512"]) == (0, 1, 2)  # 165 us and 265 us


def test_unloaded_model_is_removed_from_the_page(model: Model) -> None:
    models = [model]
    collector = ModelCollector(lambda: models, MetricsSettings())
    assert "simple" in text_format.text(collector.collect())
    models.clear()
    assert text_format.text(collector.collect()) == ""


def test_latency_counters_can_be_turned_off_and_the_others_still_count(model: Model) -> None:
    samples = values(page(model, settings=MetricsSettings(counter_latencies=False)))
    assert not [name for name in samples if name.endswith("duration_us")]
    assert samples["nv_inference_request_success"] == 2


def test_turning_off_histograms_removes_nothing_else_from_the_page(model: Model) -> None:
    all_of_it, without = parse(page(model)), parse(page(model, settings=MetricsSettings(histograms=False)))
    assert sorted(set(all_of_it) - set(without)) == [
        "nv_inference_batch_size_histogram",
        "nv_inference_compute_infer_histogram_us",
        "nv_inference_queue_histogram_us",
        "nv_inference_request_histogram_us",
    ]
    assert set(without) < set(all_of_it)


def test_summaries_have_the_form_of_tritons_and_are_absent_by_default(model: Model) -> None:
    assert "summary" not in page(model)
    summaries = Summaries()
    now_us = 400
    summaries.of(model).batch_finished([ticket(1, 100, 110)], [], BatchTimes(300 * US, 310 * US, 360 * US, now_us * US))
    settings = MetricsSettings(summary_latencies=True, quantiles=(0.5,))
    lines = page(model, settings=settings, summaries=summaries).splitlines()
    start = lines.index("# TYPE nv_inference_queue_summary_us summary")
    assert lines[start + 1 : start + 3] == [
        'nv_inference_queue_summary_us_count{model="simple",version="1"} 1',
        'nv_inference_queue_summary_us_sum{model="simple",version="1"} 190',
    ]
    assert lines[start + 3].startswith('nv_inference_queue_summary_us{model="simple",version="1",quantile="0.5"} ')
