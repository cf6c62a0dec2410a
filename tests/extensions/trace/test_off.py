"""A server that can not trace pays nothing for the distribution that is installed."""

from __future__ import annotations

from pathlib import Path

from headrace import Server
from headrace_trace import observe_model
from headrace_trace.settings import Sampler, SettingsTable, TraceSettings
from headrace_trace.tracer import TRACERS


def test_without_a_place_for_traces_there_is_no_interceptor_and_no_observer(models: Path) -> None:
    (models / "echo/1").mkdir(parents=True)
    (models / "echo/config.pbtxt").write_text(
        'backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    with Server(str(models), model_control_mode="explicit", load_model=("echo",)) as server:
        assert server.engine.admission is None
        assert not TRACERS
        (model,) = server.served()
        assert observe_model(model) is None


def test_what_is_spared_counts_as_seen() -> None:
    asked, spared = Sampler(TraceSettings(("TIMESTAMPS",), rate=5)), Sampler(TraceSettings(("TIMESTAMPS",), rate=5))
    expected = [asked.sample() for _ in range(23)]
    found: list[bool] = []
    left = 0
    while len(found) < 23:
        if left:
            left -= 1
            found.append(False)
        else:
            found.append(spared.sample())
            left = spared.spare()
    assert found == expected == [number % 5 == 4 for number in range(23)]


def test_a_change_of_settings_is_told() -> None:
    told: list[int] = []
    table = SettingsTable(TraceSettings(file="x"), lambda: told.append(1))
    table.apply("", table.merged("", {"level": ("TIMESTAMPS",), "rate": 1}))
    table.apply("m", table.merged("m", {"rate": 7}))
    assert len(told) == 2
    assert (table.of("m").rate, table.of("n").rate) == (7, 1)
