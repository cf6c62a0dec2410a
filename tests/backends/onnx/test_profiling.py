"""Profiles: ONNX Runtime writes a record of every operator into the file that the operator of the server names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError
from headrace_testing.serving import on_loop, serve

ON = 'parameters { key: "enable_profiling" value { string_value: "true" } }'
ONES = {name: np.ones((1, 16), np.float32) for name in "AB"}


def write(graphs: Any, config: str = ON) -> None:
    (graphs.add().parent / "config.pbtxt").write_text(config)


def option(folder: Path | str) -> dict[str, dict[str, str]]:
    return {"onnxruntime": {"profiling-directory": str(folder)}}


def reason(graphs: Any, **options: Any) -> str:
    with serve(graphs.root, exit_on_error=False, **options) as server:
        (entry,) = server.index()
    return entry.reason


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_session_writes_one_profile_when_it_ends(graphs: Any, tmp_path: Path, isolation: str) -> None:
    write(graphs, f'{ON} parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}')
    folder = tmp_path / "profiles"
    folder.mkdir()
    with serve(graphs.root, backend_config=option(folder)) as server:
        for _ in range(3):
            server.infer("m", ONES)
    profiles = sorted(folder.iterdir())
    begin = [path.name[: len("m_0_1_")] for path in profiles]
    if isolation == "thread":  # they share the session of the one that was first
        assert begin in (["m_0_1_"], ["m_1_1_"])
    else:
        assert begin == ["m_0_1_", "m_1_1_"]
    events = [event for path in profiles for event in json.loads(path.read_text())]
    runs = [event for event in events if event["name"] == "model_run"]
    assert len(runs) == 3
    assert {event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})} == {"Add", "Sub"}
    assert not list(graphs.root.rglob("*.json"))


def test_without_the_parameter_nothing_is_written(graphs: Any, tmp_path: Path) -> None:
    write(graphs, "")
    folder = tmp_path / "profiles"
    folder.mkdir()
    with serve(graphs.root, backend_config=option(folder)) as server:
        server.infer("m", ONES)
    assert list(folder.iterdir()) == []


def test_a_profile_needs_a_directory_that_is_not_in_the_repository(graphs: Any, tmp_path: Path) -> None:
    write(graphs)
    assert "--backend-config=onnxruntime,profiling-directory=<directory>" in reason(graphs)
    message = reason(graphs, backend_config=option(tmp_path / "nowhere"))
    assert f"profiling-directory of 'onnxruntime' is '{tmp_path / 'nowhere'}', which is no directory" in message
    for inside in (graphs.root, graphs.root / "m"):
        assert f"is '{inside}', in the model repository" in reason(graphs, backend_config=option(inside))
    (tmp_path / "link").symlink_to(graphs.root / "m")
    assert "in the model repository" in reason(graphs, backend_config=option(tmp_path / "link"))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_load_request_turns_no_profile_on(graphs: Any, tmp_path: Path, isolation: str) -> None:
    write(graphs, "")
    folder = tmp_path / "profiles"
    folder.mkdir()
    config = {
        "backend": "onnxruntime",
        "parameters": {
            "enable_profiling": {"string_value": "true"},
            "isolation": {"string_value": isolation},
        },
    }
    message = "'enable_profiling' of model 'm' came with a load request"
    with (
        serve(graphs.root, model_control_mode="explicit", backend_config=option(folder)) as server,
        pytest.raises(HeadraceError, match=message),
    ):
        on_loop(server, server.load("m", {"config": json.dumps(config)}))
    assert list(folder.iterdir()) == []
