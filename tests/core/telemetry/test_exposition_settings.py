from __future__ import annotations

from math import inf, isnan, nan

import pytest

from headrace.errors import ConfigError
from headrace.telemetry import exposition
from headrace.telemetry.exposition import DEFAULT_QUANTILES, MetricsSettings
from headrace.telemetry.summaries import Summary


def test_defaults_are_tritons() -> None:
    assert exposition.parse_metrics_config({}) == MetricsSettings(True, False, False, (0.5, 0.9, 0.95, 0.99, 0.999))


def test_an_unknown_setting_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert exposition.parse_metrics_config({"colour": "blue"}) == MetricsSettings()
    (message,) = caplog.messages
    assert message.startswith("--metrics-config: no setting 'colour'; there are: counter_latencies, exclude, ")


@pytest.mark.parametrize(
    "setting", ["counter_latencies", "histogram_latencies", "summary_latencies", "histograms", "native_histograms"]
)
def test_a_switch_is_true_or_false_and_nothing_else(setting: str) -> None:
    for text in ("true", "false"):
        assert getattr(exposition.parse_metrics_config({setting: text}), setting) is (text == "true")
    for text in ("5", "True", "FALSE", "", " true"):
        with pytest.raises(ConfigError, match=f"--metrics-config: {setting}: '{text}' is not true or false"):
            exposition.parse_metrics_config({setting: text})


def test_quantiles_are_pairs_of_quantile_and_error() -> None:
    assert exposition.parse_metrics_config({"summary_quantiles": "0.25:0.05,0.75:0.01"}).quantiles == (0.25, 0.75)


@pytest.mark.parametrize(
    ("text", "quantiles", "refused"),
    [
        ("0.1:0.0.1", (0.1,), []),
        (" 0.5abc:0.1", (0.5,), []),
        ("0x1p-1:0.1", (0.5,), []),
        ("0.5:0.1:3", (0.5,), []),
        ("0.5:0.1,", (0.5,), []),
        ("1.5:0.1", (1.5,), []),
        ("-1:0.1", (-1,), []),
        ("inf:0.1", (inf,), []),
        ("0.5:0.1,x:0.2", (0.5,), ["[x:0.2]. Error: stod"]),
        ("x:0.2,0.5:0.1", (0.5,), ["[x:0.2]. Error: stod"]),
        ("0.25:0.1,,0.75:0.1", (0.25, 0.75), ["[]. No ':' delimiter found. Expected format is <quantile>:<error>"]),
        ("0.1", DEFAULT_QUANTILES, ["[0.1]. No ':' delimiter found. Expected format is <quantile>:<error>"]),
        ("0.5:", DEFAULT_QUANTILES, ["[0.5:]. Error: stod"]),
        (":0.1", DEFAULT_QUANTILES, ["[:0.1]. Error: stod"]),
        ("0.1:x", DEFAULT_QUANTILES, ["[0.1:x]. Error: stod"]),
        ("0x1p99999:0.1", DEFAULT_QUANTILES, ["[0x1p99999:0.1]. hexadecimal value too large"]),  # where Triton ends
    ],
)
def test_quantiles_are_read_as_by_triton(
    caplog: pytest.LogCaptureFixture, text: str, quantiles: tuple[float, ...], refused: list[str]
) -> None:
    assert exposition.parse_metrics_config({"summary_quantiles": text}).quantiles == quantiles
    warnings = [message.partition("Invalid option: ")[2] for message in caplog.messages]
    assert [words.partition(" to represent")[0] for words in warnings] == refused


@pytest.mark.parametrize(("quantile", "value"), [(1.5, 3), (inf, 3), (-1, 1), (-inf, 1)])
def test_a_quantile_beyond_all_samples_is_that_of_the_last(quantile: float, value: int) -> None:
    summary = Summary()
    for us in (1, 2, 3):
        summary.record(us, now_ns=0)
    assert summary.quantiles([quantile], 0) == [value]


def test_a_quantile_that_is_no_number_has_no_value() -> None:
    summary = Summary()
    summary.record(1, now_ns=0)
    assert isnan(*summary.quantiles([nan], 0))


NAMES = ("nv_inference_count", "nv_inference_request_histogram_us", "headrace_log_lines_lost", "my:own")


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({}, NAMES),
        ({"include": "*"}, NAMES),
        ({"include": "nv_*,my:own"}, (NAMES[0], NAMES[1], NAMES[3])),
        ({"exclude": "*_histogram_us,headrace_*"}, (NAMES[0], NAMES[3])),
        ({"include": "nv_*", "exclude": "nv_inference_coun?"}, (NAMES[1],)),
        ({"include": "NV_INFERENCE_COUNT"}, ()),
    ],
)
def test_patterns_choose_the_families(config: dict[str, str], shown: tuple[str, ...]) -> None:
    assert tuple(filter(exposition.family_filter(config), NAMES)) == shown


@pytest.mark.parametrize("text", ["nv_[ab]", "a,,b", "a,", " a", "a|b", "nv-count", "é"])
@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_a_pattern_that_no_name_matches_is_refused(setting: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-config: {setting}: .* is no pattern of a name"):
        exposition.family_filter({setting: text})
