"""The object that the instances of a version share is released once for each creation, however they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]

SAMPLE = """model_warmup { name: "w" batch_size: 1
inputs { key: "x" value { data_type: TYPE_FP32 dims: [2] zero_data: true } } }"""


def life(model: Running) -> list[str]:
    return (model.folder / "life").read_text().split()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_shared_objects_are_released_after_the_last_instance_has_closed(run_trial: Run, isolation: str) -> None:
    model = run_trial(instances=2, isolation=isolation)
    model.infer()
    model.stop()
    if isolation == "thread":
        assert life(model) == ["shared", "closed", "closed", "unshared"]
    else:  # each process has its own
        assert sorted(life(model)) == ["closed"] * 2 + ["shared"] * 2 + ["unshared"] * 2
        assert life(model)[-1] == "unshared"


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    ("options", "lived", "reason"),
    [
        ({"load": "raise"}, ["shared", "unshared"], "failed to load 'm': ValueError: raised on purpose"),
        ({"load": "quit"}, ["shared", "unshared"], "failed to load 'm': SystemExit: 3"),
        ({"warm_up": "raise"}, ["shared", "closed", "unshared"], "failed to load 'm': ValueError: raised on purpose"),
        ({"warm_up": "quit", "close": "quit"}, ["shared", "closed", "unshared"], "failed to load 'm': SystemExit: 3"),
        ({"share": "raise"}, [], "failed to load 'm': ValueError: raised on purpose"),
        ({"share": "quit"}, [], "failed to load 'm': SystemExit: 3"),
        ({"always": "raise"}, ["shared", "closed", "unshared"], "failed to run warmup sample 'w'"),
    ],
)
def test_a_failed_load_releases_what_was_shared_and_keeps_its_reason(
    run_trial: Run, isolation: str, options: dict[str, Any], lived: list[str], reason: str
) -> None:
    config = SAMPLE if "always" in options else ""
    model = run_trial(isolation=isolation, config=config, **options)
    assert reason in model.reason
    assert (life(model) if (model.folder / "life").exists() else []) == lived


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("deed", ["raise", "quit"])
def test_a_model_is_unloaded_although_what_was_shared_cannot_be_released(
    run_trial: Run, isolation: str, deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = run_trial(isolation=isolation, unshare=deed, close=deed)
    model.stop()
    (record,) = model.server.index()
    assert (record.state, record.reason) == ("UNAVAILABLE", "unloaded")
    assert "model instance 'm_0_0' failed to close" in caplog.text
    assert "backend 'trial' failed to release what the instances of 'm' share" in caplog.text
