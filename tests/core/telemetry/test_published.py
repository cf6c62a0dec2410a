"""Metrics of plugins. The oracle is prometheus-client's parser."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.telemetry.published import PublishedMetric, PublishedMetrics, Publisher
from headrace_http import text_format

DEPTH = PublishedMetric("headrace_part_depth", "How deep it is")
STEPS = PublishedMetric("headrace_part_steps_total", "How far it has come", "counter")
ONE, TWO = {"model": "one", "version": "1"}, {"model": "two", "version": "1"}


class Part:
    name = "part"

    def __init__(self, values: Any, *metrics: PublishedMetric) -> None:
        self.values, self.metrics = values, metrics or (DEPTH, STEPS)

    def measure(self) -> Mapping[str, Any]:
        if isinstance(self.values, BaseException):
            raise self.values
        values: Mapping[str, Any] = self.values
        return values


def sound(depth: float) -> Part:
    return Part({DEPTH.name: depth, STEPS.name: 3})


def page(*parts: tuple[dict[str, str], Publisher], of: PublishedMetrics | None = None) -> dict[str, dict[str, float]]:
    """To each name of a sample, the values by model."""
    text = text_format.text((of or PublishedMetrics(lambda: parts)).collect())
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[sample.labels.get("model", "")] = sample.value
    return samples


SIDES = PublishedMetric("headrace_part_sides", "How deep each side is", label="side")


def test_a_metric_with_a_label_has_a_number_for_each_of_its_values() -> None:
    parts = [(ONE, Part({SIDES.name: {"left": 2, 'right "n"': 1.5}}, SIDES)), (TWO, Part({SIDES.name: {}}, SIDES))]
    (family,) = text_string_to_metric_families(text_format.text(PublishedMetrics(lambda: parts).collect()))
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({**ONE, "side": "left"}, 2),
        ({**ONE, "side": 'right "n"'}, 1.5),
    ]


@pytest.mark.parametrize(("metric", "value"), [(SIDES, 1.0), (DEPTH, {"left": 1.0})])
def test_a_label_is_declared(metric: PublishedMetric, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert page((ONE, Part({metric.name: value}, metric))) == {}
    assert f"metric '{metric.name}' has the label '{metric.label}', and measures " in caplog.text


@pytest.mark.parametrize("label", ["model", "version", "headrace_worker", "Side", "a b", "1"])
def test_a_label_that_breaks_the_rule_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"a label has only small letters, digits and '_', and the server adds model"):
        PublishedMetric("headrace_part_sides", "", label=label)


def test_the_page_has_each_number_with_its_labels_kind_and_help() -> None:
    text = text_format.text(PublishedMetrics(lambda: [(ONE, sound(2.5)), ({}, sound(1))]).collect())
    assert text.splitlines() == [
        "# HELP headrace_part_depth How deep it is",
        "# TYPE headrace_part_depth gauge",
        'headrace_part_depth{model="one",version="1"} 2.5',
        "headrace_part_depth 1",
        "# HELP headrace_part_steps_total How far it has come",
        "# TYPE headrace_part_steps_total counter",
        'headrace_part_steps_total{model="one",version="1"} 3',
        "headrace_part_steps_total 3",
    ]


@pytest.mark.parametrize(
    "broken",
    [
        Part(KeyError("depth")),
        Part(SystemExit(3)),
        Part({DEPTH.name: 1}),
        Part({DEPTH.name: 1, STEPS.name: 1, "headrace_part_more": 1}),
        Part({DEPTH.name: 1, STEPS.name: None}),
        Part(None),
        Part({DEPTH.name: 1}, DEPTH, DEPTH),
        Part({}, "depth"),  # type: ignore[arg-type]
        Part({DEPTH.name: 1, STEPS.name: 1}, PublishedMetric(STEPS.name, "", "counter"), DEPTH, None),  # type: ignore[arg-type]
    ],
    ids=["raises", "exits", "forgets", "adds", "none", "nothing", "twice", "text", "no metric"],
)
def test_publisher_that_fails_is_omitted_alone_and_logged_once(broken: Part, caplog: pytest.LogCaptureFixture) -> None:
    parts = [(ONE, broken), (TWO, sound(4))]
    metrics = PublishedMetrics(lambda: parts)
    for _ in range(3):
        assert page(of=metrics) == {DEPTH.name: {"two": 4}, STEPS.name: {"two": 3}}
    (line,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert line.getMessage().startswith("the metrics of 'part' of {'model': 'one', 'version': '1'} could not be read")


def test_publisher_that_recovers_is_shown_and_logged_when_it_fails_again(caplog: pytest.LogCaptureFixture) -> None:
    part = Part(RuntimeError("not now"))
    metrics = PublishedMetrics(lambda: [(ONE, part)])
    assert page(of=metrics) == {}
    part.values = {DEPTH.name: 0, STEPS.name: 0}
    assert page(of=metrics) == {DEPTH.name: {"one": 0}, STEPS.name: {"one": 0}}
    part.values = RuntimeError("again")
    assert page(of=metrics) == {}
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("depth", "gauge", "begins with 'headrace_'"),
        ("nv_inference_count", "gauge", "begins with 'headrace_'"),
        ("headrace_", "gauge", "begins with 'headrace_'"),
        ("headrace_Depth", "gauge", "only small letters, digits and '_'"),
        ("headrace_depth ", "gauge", "only small letters, digits and '_'"),
        ("headrace_depth\n", "gauge", "only small letters, digits and '_'"),
        ("headrace_steps", "counter", "the name of a counter, and only of a counter, ends in _total"),
        ("headrace_total", "gauge", "the name of a counter, and only of a counter, ends in _total"),
        ("headrace_depth", "histogram", "expected 'gauge' or 'counter'"),
    ],
)
def test_a_declaration_that_breaks_the_rule_is_refused_where_it_stands(name: str, kind: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PublishedMetric(name, "help", kind)
