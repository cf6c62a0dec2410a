from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.telemetry import exposition
from headrace.telemetry.exposition import MetricsSettings


def test_defaults_are_tritons() -> None:
    assert exposition.parse_metrics_config({}) == MetricsSettings(True, False, (0.5, 0.9, 0.95, 0.99, 0.999))


def test_settings_that_triton_does_not_know_change_nothing() -> None:
    assert exposition.parse_metrics_config({"colour": "blue", "histogram_latencies": "true"}) == MetricsSettings()


def test_only_the_exact_words_true_and_false_count() -> None:
    assert (
        exposition.parse_metrics_config({"counter_latencies": "False", "summary_latencies": "True"})
        == MetricsSettings()
    )
    assert exposition.parse_metrics_config({"counter_latencies": "false"}).counter_latencies is False
    assert exposition.parse_metrics_config({"summary_latencies": "true"}).summary_latencies is True


def test_quantiles_are_pairs_of_quantile_and_error() -> None:
    assert exposition.parse_metrics_config({"summary_quantiles": "0.25:0.05,0.75:0.01"}).quantiles == (0.25, 0.75)


@pytest.mark.parametrize("text", ["", "0.5", "0.5:", "x:0.1", "1.5:0.1", "0.5:0.1,", "0.5:nan", "0.5:0.1:0.2"])
def test_what_is_no_quantile_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="summary_quantiles"):
        exposition.parse_metrics_config({"summary_quantiles": text})
