from __future__ import annotations

from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headrace_http import text_format

#: The answer of Triton 2.51 to GET /metrics, with summaries on and a model with a metric tag.
TRITON_PAGE = (Path(__file__).parents[1] / "telemetry/triton.prom").read_text()


def test_tritons_own_page_is_written_byte_for_byte() -> None:
    parsed = list(text_string_to_metric_families(TRITON_PAGE))
    for family in parsed:  # this parser puts `_total` behind the samples of a counter
        family.samples = [sample._replace(name=sample.name.removesuffix("_total")) for sample in family.samples]
    assert text_format.text(parsed) == TRITON_PAGE


def test_family_without_series_is_not_written() -> None:
    assert text_format.text([Metric("nv_nothing", "No series", "gauge")]) == ""


def test_label_values_and_help_texts_are_escaped_so_that_a_parser_reads_them_back() -> None:
    nasty = 'quote " backslash \\ newline \n end'
    family = Metric("nv_nasty", nasty, "gauge")
    family.samples.append(Sample("nv_nasty", {"model": nasty}, 1))
    [parsed] = text_string_to_metric_families(text_format.text([family]))
    assert parsed.documentation == nasty
    assert parsed.samples == [Sample("nv_nasty", {"model": nasty}, 1)]


def test_numbers_have_sixteen_digits_so_that_decimal_fractions_stay_short() -> None:
    family = Metric("nv_fraction", "A tenth", "gauge")
    family.samples.append(Sample("nv_fraction", {}, 0.1))  # 0.10000000000000001 with seventeen
    assert text_format.text([family]).endswith("nv_fraction 0.1\n")


def test_infinities_are_spelled_with_a_sign() -> None:
    family = Metric("nv_edge", "Edge", "unknown")
    family.samples += [Sample("nv_edge", {}, float("inf")), Sample("nv_edge", {}, float("-inf"))]
    assert text_format.text([family]).splitlines()[1:] == ["# TYPE nv_edge untyped", "nv_edge +Inf", "nv_edge -Inf"]
