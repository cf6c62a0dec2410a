"""The server metadata if this scheduler is installed."""

from __future__ import annotations

from pathlib import Path

from headrace import Server


def test_the_scheduler_announces_the_extension_sequence(tmp_path: Path) -> None:
    with Server(tmp_path, model_control_mode="explicit", plugins=()) as server:
        without = server.metadata().extensions
    with Server(tmp_path, model_control_mode="explicit", plugins=("headrace-sequence",)) as server:
        assert server.metadata().extensions == [without[0], "sequence", *without[1:]]
    assert without[:2] == ["classification", "model_repository"]
