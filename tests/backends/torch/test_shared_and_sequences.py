"""Weights that instances share, and sequences with controls and state: TorchScript and programs of torch.export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
from google.protobuf import text_format

from headrace import ConfigError, GraphTensor, Instance, Model, ModelConfig
from headrace.config.derive import derive
from headrace.testing.serving import serve
from headrace_torch import Parameters, PyTorch
from headrace_torch.leaf_names import LeafNames
from headrace_torch.program_signature import Leaf, ProgramSignature

ONE = """input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 2 }"""
SUMS = """max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "sum__0" data_type: TYPE_FP32 dims: 1 }
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "so_far" output_name: "next__1" data_type: TYPE_FP32 dims: 1 }
}"""


class Tally(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


class RunningSum(torch.nn.Module):
    def forward(self, x: torch.Tensor, START: torch.Tensor, so_far: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
        total = so_far * (1 - START) + x
        return total * 1, total


@pytest.fixture(params=["script", "program"])
def save(request: pytest.FixtureRequest, scripts: Any, programs: Any) -> Any:
    """Saves a module with examples of its inputs; gives the repository."""

    def saved(module: torch.nn.Module, *examples: torch.Tensor) -> Path:
        if request.param == "script":
            scripts.save(module)
            return Path(scripts.root)
        rows = torch.export.Dim("rows", min=1, max=4)
        batched = [{0: rows} for _ in examples] if len(examples) > 1 else None
        programs.save(module, *examples, dynamic_shapes=batched)
        return Path(programs.root)

    return saved


def two_instances(repository: Path, **parameters: Any) -> list[Instance]:
    config = text_format.Parse(f'backend: "pytorch" {ONE}', ModelConfig())
    config.name = "m"
    derive(config, repository / "m")
    backend = PyTorch({})
    model = Model("m", 1, repository / "m" / "1", config, Parameters(**parameters), instance_name="m_0")
    model = replace(model, shared=backend.share(model))
    return [backend.load(model), backend.load(model)]


@pytest.mark.parametrize(("shared", "counted"), [(True, [1, 2, 3]), (False, [1, 1, 2])])
def test_instances_share_weights_where_the_config_says_so(save: Any, shared: bool, counted: list[int]) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), enable_weight_sharing=shared)
    zeros = {"x": np.zeros(2, np.float32)}
    found = [float(np.asarray(each.execute(zeros)["OUTPUT__0"])[0]) for each in (first, second, first)]
    assert found == counted


def test_an_instance_that_closes_leaves_shared_weights_to_the_others(save: Any) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), enable_weight_sharing=True)
    first.close()
    assert list(np.asarray(second.execute({"x": np.zeros(2, np.float32)})["OUTPUT__0"])) == [1, 1]


def test_a_sequence_is_told_its_start_and_keeps_its_state(save: Any) -> None:
    repository = save(RunningSum(), *[torch.zeros(2, 1) for _ in range(3)])
    (repository / "m" / "config.pbtxt").write_text(f'backend: "pytorch" {SUMS}')
    with (
        serve(repository, listen=True) as server,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client,
    ):

        def send(value: float, sequence: int, **flags: bool) -> float:
            x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            x.set_data_from_numpy(np.array([[value]], np.float32))
            return float(client.infer("m", [x], sequence_id=sequence, **flags).as_numpy("sum__0")[0, 0])

        assert send(1, 7, sequence_start=True) == 1
        assert send(10, 8, sequence_start=True) == 10
        assert send(2, 7) == 3
        assert send(20, 8, sequence_end=True) == 30
        assert send(3, 7, sequence_end=True) == 6
        assert send(5, 7, sequence_start=True, sequence_end=True) == 5, "a sequence of the same number starts anew"


def test_where_a_package_tells_nothing_the_config_is_believed_of_controls_and_state() -> None:
    unknown = [
        Leaf(GraphTensor(f"INPUT__{place}", None, "unknown", ()), f"ARGS[{place}]", is_known=False)
        for place in range(3)
    ]
    results = [
        Leaf(GraphTensor(f"OUTPUT__{place}", None, "unknown", ()), f"RESULT[{place}]", is_known=False)
        for place in range(2)
    ]
    signature = ProgramSignature(unknown, results, {})
    config = text_format.Parse(SUMS.replace("max_batch_size: 4", "max_batch_size: 1"), ModelConfig())
    names = LeafNames(config, signature)
    names.require_agreement()
    assert names.ordered_inputs == ["x", "START", "so_far"]
    with pytest.raises(ConfigError, match="expects 3 inputs, model provides 2"):
        LeafNames(config, ProgramSignature(unknown[:2], results, {}))
