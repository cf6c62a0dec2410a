"""Weights that instances share, and inputs that no client sends: those of sequences, with controls and state, and of
ragged batches and padding. TorchScript and programs of torch.export."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
from google.protobuf import text_format

from headrace import ConfigError, Instance, Model, ModelConfig
from headrace.config.derive import derive
from headrace.storage.local_storage import files_below
from headrace_engines import GraphTensor
from headrace_testing.serving import serve
from headrace_torch import Parameters, PyTorch
from headrace_torch.program_signature import Leaf, ProgramSignature
from headrace_torch.tensor_names import LeafNames

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
    """Saves a module with examples of its inputs, and the sizes of them that may vary; gives the repository."""

    def saved(module: torch.nn.Module, *examples: torch.Tensor, shapes: Any = None) -> Path:
        if request.param == "script":
            scripts.save(module)
            return Path(scripts.root)
        programs.save(module, *examples, dynamic_shapes=shapes)
        return Path(programs.root)

    return saved


def two_instances(repository: Path, more: str = "", **parameters: Any) -> list[Instance]:
    config = text_format.Parse(
        f'backend: "pytorch" {ONE} instance_group {{ count: 2 kind: KIND_CPU }} {more}', ModelConfig()
    )
    config.name = "m"
    derive(config, "m", files_below(repository / "m"))
    backend = PyTorch({})
    model = Model("m", 1, repository / "m" / "1", config, Parameters(**parameters), instance_name="m_0")
    model = replace(model, shared=backend.share(model))
    return [backend.load(model), backend.load(model)]


@pytest.mark.parametrize(("shared", "counted"), [(True, [1, 2, 3]), (None, [1, 2, 3]), (False, [1, 1, 2])])
def test_instances_share_weights_by_default(save: Any, shared: bool | None, counted: list[int]) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), enable_weight_sharing=shared)
    zeros = {"x": np.zeros(2, np.float32)}
    found = [float(np.asarray(each.execute(zeros)["OUTPUT__0"])[0]) for each in (first, second, first)]
    assert found == counted


@pytest.mark.parametrize(("shared", "needs_lock"), [(None, True), (True, False)])
def test_a_stateful_module_runs_in_one_instance_at_a_time(save: Any, shared: bool | None, needs_lock: bool) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), enable_weight_sharing=shared)
    inside = [0]
    most = [0]
    both_are_inside = threading.Event()

    def watched(run: Any) -> Any:
        def call(*tensors: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if inside[0] == 2:
                both_are_inside.set()
            both_are_inside.wait(0.05 if needs_lock else 60)
            inside[0] -= 1
            return run(*tensors)

        return call

    for each in (first, second):
        each._run = watched(each._run)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(each.execute, {"x": np.zeros(2, np.float32)}) for each in (first, second)]
        counts = sorted(float(np.asarray(each.result()["OUTPUT__0"])[0]) for each in found)
    assert not needs_lock or counts == [1, 2], "side by side, both may read the count after both have added to it"
    assert most == [1 if needs_lock else 2]
    assert first.any_thread is second.any_thread is not needs_lock, "the event loop would wait for its turn"


def test_a_stateless_module_runs_concurrently(save: Any) -> None:
    first, second = two_instances(save(torch.nn.ReLU(), torch.zeros(2)))
    assert first._run.__self__ is second._run.__self__ if hasattr(first._run, "__self__") else first._run is second._run  # type: ignore[attr-defined]
    assert first.any_thread


def test_instances_of_sequences_do_not_share_state(save: Any) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), "sequence_batching { }")
    zeros = {"x": np.zeros(2, np.float32)}
    assert [float(np.asarray(each.execute(zeros)["OUTPUT__0"])[0]) for each in (first, second, first)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ('platform: "pytorch_libtorch"', 2),
        ('platform: "torch_aoti"', 2),
        ('platform: "torch_aoti" parameters { key: "trust" value { string_value: "true" } }', 1),
        ('parameters { key: "trust" value { string_value: "true" } }', 2),
        ('parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "false" } }', 1),
        ('parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }', 2),
        ('parameters { key: "isolation" value { string_value: "process" } }', 1),
        ('runtime: "model.py"', 1),
        ("sequence_batching { }", 1),
    ],
)
def test_two_instances_where_they_share_their_weights_safely(config: str, count: int) -> None:
    assert PyTorch({}).cpu_instances(text_format.Parse(config, ModelConfig())) == count


def test_two_instances_take_the_memory_of_one(scripts: Any) -> None:
    """Weights of 64 MiB, measured by the growth of the process with each load."""

    def own_memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    scripts.save(torch.nn.Linear(2, 8 * 2**20, bias=False))
    config = text_format.Parse(ONE, ModelConfig())
    config.instance_group.add(count=2)
    backend = PyTorch({})
    model = Model("m", 1, scripts.root / "m" / "1", config, Parameters(), instance_name="m_0")
    model = replace(model, shared=backend.share(model))
    sizes = [own_memory()]
    instances = []
    for _ in range(2):
        instances.append(backend.load(model))
        sizes.append(own_memory())
    assert sizes[1] - sizes[0] > 32 * 2**20, "one has them"
    assert sizes[2] - sizes[1] < 8 * 2**20, "the other uses the same"


def test_closing_an_instance_does_not_free_shared_weights(save: Any) -> None:
    first, second = two_instances(save(Tally(), torch.zeros(2)), enable_weight_sharing=True)
    first.close()
    assert list(np.asarray(second.execute({"x": np.zeros(2, np.float32)})["OUTPUT__0"])) == [1, 1]


def test_a_sequence_gets_its_start_and_keeps_its_state(save: Any) -> None:
    pytest.importorskip("headrace_sequence")
    rows = torch.export.Dim("rows", min=1, max=4)
    repository = save(RunningSum(), *[torch.zeros(2, 1) for _ in range(3)], shapes=[{0: rows} for _ in range(3)])
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


class SumOfElements(torch.nn.Module):
    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        total = x.cumsum(0)[sizes - 1]
        return torch.diff(total, prepend=torch.zeros(1)).unsqueeze(1)


def test_a_ragged_input_has_its_batch_input(save: Any) -> None:
    elements, ends = torch.export.Dim("elements", min=2, max=99), torch.export.Dim("ends", min=1, max=4)
    repository = save(
        SumOfElements(), torch.zeros(5), torch.tensor([2, 5], dtype=torch.int32), shapes=[{0: elements}, {0: ends}]
    )
    (repository / "m" / "config.pbtxt").write_text("""backend: "pytorch" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_INT32
                      source_input: "x" }
        output { name: "sum__0" data_type: TYPE_FP32 dims: [1] }
        """)
    with serve(repository) as server:
        found = server.infer("m", {"x": np.array([[1, 2, 3.5]], np.float32)}).outputs["sum__0"]
    np.testing.assert_array_equal(np.asarray(found), [[6.5]])


class MaskedSum(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(1, keepdim=True)


def test_a_padded_input_has_its_mask(save: Any) -> None:
    rows, length = torch.export.Dim("rows", min=1, max=4), torch.export.Dim("length", min=2, max=8)
    repository = save(MaskedSum(), torch.zeros(2, 4), torch.zeros(2, 4), shapes=[{0: rows, 1: length}] * 2)
    mask = {"name": "mask", "data_type": "TYPE_FP32"}
    padding = json.dumps({"pad": [{"input": "x", "axis": 0, "buckets": [4, 8], "value": 9, "mask": mask}]})
    (repository / "m" / "config.pbtxt").write_text(f"""backend: "pytorch" max_batch_size: 4
        input {{ name: "x" data_type: TYPE_FP32 dims: [-1] }}
        output {{ name: "sum__0" data_type: TYPE_FP32 dims: [1] }}
        parameters {{ key: "padding" value {{ string_value: {json.dumps(padding)} }} }}
        """)
    with serve(repository) as server:
        found = server.infer("m", {"x": np.array([[1, 2, 3]], np.float32)}).outputs["sum__0"]
    np.testing.assert_array_equal(np.asarray(found), [[6]])


def test_without_shapes_in_the_package_the_config_declares_controls_and_state() -> None:
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
