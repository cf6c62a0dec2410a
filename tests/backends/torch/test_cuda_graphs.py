"""CUDA graphs of a config, on a GPU that the host plays: a graph runs its operators again on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from headrace import ConfigError, LoadError, StackedTensors
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch.cuda_graph_sizes import graph_sizes
from headrace_torch.instance import ForwardInstance
from tests.backends.torch.played_cuda import CONFIG, Played, PlayedGraph

GRAPHS = " optimization { cuda { graphs: true %s } }"


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    PlayedGraph.captured.clear()


def sizes(config: str) -> list[tuple[int, int]]:
    return [(size.least, size.rows) for size in graph_sizes(text_format.Parse(config, ModelConfig()))[::-1]]


def x(value: float, rows: int) -> Any:
    return np.full((rows, 4), value, np.float32)


def captured(monkeypatch: pytest.MonkeyPatch, more: str = "", **parameters: Any) -> Played:
    played = Played(monkeypatch, GRAPHS % more, **parameters)
    played.instance.warm_up()
    return played


def test_a_batch_is_padded_to_the_next_size_unless_the_config_has_sizes() -> None:
    rows = [rows for _, rows in sizes("max_batch_size: 64")]
    assert rows == [*range(1, 9), 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert sizes("max_batch_size: 6")[-1] == (6, 6)
    assert sizes("max_batch_size: 11")[-2:] == [(8, 8), (9, 11)]
    assert len(sizes("max_batch_size: 1024")) < 60
    preferred = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 8 ] }"
    assert sizes(preferred) == [(1, 4), (5, 8)]
    assert sizes("") == [(0, 0)]
    specs = "graph_spec { batch_size: 4 } graph_spec { batch_size: 8 graph_lower_bound { batch_size: 5 } }"
    assert sizes("max_batch_size: 8" + GRAPHS % specs) == [(4, 4), (5, 8)]


@pytest.mark.parametrize(
    ("most", "spec", "problem"),
    [
        (8, "batch_size: 9", "1 to 'max_batch_size', 8, not 9"),
        (0, "batch_size: 1", "to be 0 if 'max_batch_size' is 0"),
        (8, 'batch_size: 1 input { key: "z" value { dim: 1 } }', "unknown input 'z'"),
        (8, 'batch_size: 2 graph_lower_bound { batch_size: 1 input { key: "x" value { dim: 1 } } }', "differs in more"),
        (8, "batch_size: 2 graph_lower_bound { batch_size: 3 }", "smaller batch_size"),
    ],
)
def test_a_wrong_spec_is_refused_with_its_place(most: int, spec: str, problem: str) -> None:
    config = f'max_batch_size: {most} input {{ name: "x" dims: 1 }}' + GRAPHS % f"graph_spec {{ {spec} }}"
    with pytest.raises(ConfigError, match=problem) as found:
        sizes(config)
    assert found.value.field == "optimization.cuda.graph_spec[0]"


def test_each_batch_is_replayed_with_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def run(x: Any) -> Any:
        calls.append(len(x))
        return {"y": x * 2 + x.sum(1, keepdim=True)}

    played = captured(monkeypatch, run=run)
    assert len(PlayedGraph.captured) == 18
    calls.clear()
    results = []
    for rows in (64, 1, 9, 33, 9):
        rows_of = x(rows, rows)
        rows_of[:, 1] = np.arange(rows)
        found = played.call(StackedTensors([rows_of[:1], rows_of[1:]]) if rows > 1 else rows_of)
        results.append((found, rows_of * 2 + rows_of.sum(1, keepdims=True)))
    for found, expected in results:  # none is written to by a later call
        np.testing.assert_array_equal(found, expected)
    assert calls == []
    assert sum(graph.replays for graph in PlayedGraph.captured) == 18 + 5


def test_the_rows_of_other_callers_are_not_left_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    played = captured(
        monkeypatch,
        "graph_spec { batch_size: 8 graph_lower_bound { batch_size: 1 } }",
        run=lambda x: x.sum(0).expand(x.shape),
    )
    np.testing.assert_array_equal(played.call(x(100, 8)), x(800, 8))
    np.testing.assert_array_equal(played.call(x(1, 2)), x(2, 2))


def test_other_shapes_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    played = captured(monkeypatch, "graph_spec { batch_size: 4 }")
    assert len(PlayedGraph.captured) == 1
    np.testing.assert_array_equal(played.call(x(3, 5)), x(6, 5))
    np.testing.assert_array_equal(played.call(np.ones((4, 7), np.float32)), np.full((4, 7), 2, np.float32))
    assert PlayedGraph.captured[0].replays == 1
    np.testing.assert_array_equal(played.call(x(3, 4)), x(6, 4))
    assert PlayedGraph.captured[0].replays == 2


def test_a_spec_may_name_other_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = 'graph_spec { batch_size: 2 input { key: "x" value { dim: 3 } } } graph_spec { batch_size: 2 }'
    played = captured(monkeypatch, spec)
    for dims in (3, 4):
        np.testing.assert_array_equal(played.call(np.ones((2, dims), np.float32)), np.full((2, dims), 2, np.float32))
    assert [graph.replays for graph in PlayedGraph.captured] == [2, 2]


def test_several_results_are_cut_and_a_dictionary_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inputs: Any) -> Any:
        return [inputs["x"] + 1, torch.ones(3)]

    played = captured(monkeypatch, run=run, forward={"takes_dict": True, "arguments": ["given"]})
    np.testing.assert_array_equal(played.call(x(1, 10)), x(2, 10))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (lambda x: x * 2 if x.sum().item() >= 0 else x, "of 64 rows cannot be captured: .*not permitted when stream"),
        (lambda x: 1 / 0, "of 64 rows cannot be captured: .*division by zero"),
    ],
)
def test_a_model_without_graphs_is_refused_with_reason(monkeypatch: pytest.MonkeyPatch, run: Any, problem: str) -> None:
    with pytest.raises(LoadError, match=problem) as found:
        captured(monkeypatch, run=run)
    assert "leave 'graphs' out" in found.value.message


def test_dims_that_vary_need_a_spec_and_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    varies = CONFIG.replace("dims: 4", "dims: -1")
    monkeypatch.setattr("tests.backends.torch.played_cuda.CONFIG", varies)
    with pytest.raises(
        LoadError, match="the dims of input 'x' vary: a graph has one shape, which a graph_spec may name"
    ):
        captured(monkeypatch)
    spec = 'graph_spec { batch_size: 2 input { key: "x" value { dim: 3 } } }'
    played = captured(monkeypatch, spec)
    np.testing.assert_array_equal(played.call(np.ones((2, 3), np.float32)), np.full((2, 3), 2, np.float32))
    script = {"changes": True}
    with pytest.raises(LoadError, match="changes its own state"):
        captured(monkeypatch, forward=script)


def test_a_model_on_the_cpu_is_served_without(scripts: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    instance = scripts.load(Twice(), CONFIG + GRAPHS % "")
    assert isinstance(instance, ForwardInstance)
    instance.warm_up()
    np.testing.assert_array_equal(instance.execute({"x": x(1, 2)})["y"], x(2, 2))
    assert "optimization.cuda.graphs has no effect on a CPU" in caplog.text


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_torch_compile_with_graphs_are_refused(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with pytest.raises(LoadError, match=f"mode '{mode}' of parameter .* captures graphs itself"):
        captured(monkeypatch, torch_compile=f'{{"mode": "{mode}"}}')
