"""Warm-up requests reach an instance as requests of clients do (what Triton 2.51 does with the same configs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.registry import PluginInfo
from headrace.server import Server

LEAD = "Invalid argument: warmup sample 'w' of model 'm': "


class Shapes(Instance):
    def __init__(self, path: Path) -> None:
        self.path = path

    def execute(self, inputs: Tensors) -> Tensors:
        with self.path.open("a") as file:
            print({name: np.shape(tensor) for name, tensor in sorted(inputs.items())}, file=file)
        return {"y": inputs["x"]}


class ShapesBackend(Backend):
    name: ClassVar[str] = "shapes"

    def load(self, model: Model) -> Shapes:
        return Shapes(model.path / "shapes")


CONFIG = """
backend: "shapes" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 {io} }} output {{ name: "y" data_type: TYPE_FP32 {io} }}
model_warmup {{
  name: "w" batch_size: 2 {more}
  inputs {{ key: "{name}" value {{ data_type: {type} dims: {dims} zero_data: true }} }}
}}
"""


@pytest.fixture
def load(make_server: Callable[..., Server], write_model: Any) -> Callable[..., tuple[str, list[str]]]:
    """Loads a model, and gives why it failed, and the shapes that its instance has seen."""

    def load(io: str, name: str = "x", type: str = "TYPE_FP32", dims: str = "[]", more: str = "") -> Any:
        path = write_model("m", CONFIG.format(io=io, name=name, type=type, dims=dims, more=more))
        server = make_server(exit_on_error=False)
        server.plugins.backends.add(ShapesBackend, PluginInfo("shapes", "tests", "0"))
        with server:
            (entry,) = server.index()
        seen = path / "1" / "shapes"
        return entry.reason.removesuffix("unloaded"), seen.read_text().splitlines() if seen.exists() else []

    return load


@pytest.mark.parametrize(
    ("io", "dims", "shape"),
    [
        ("dims: [1] reshape { shape: [] }", "[1]", (2,)),
        ("dims: [4] reshape { shape: [2, 2] }", "[4]", (2, 2, 2)),
        ("dims: [-1] reshape { shape: [1, -1] }", "[5]", (2, 1, 5)),
        ("dims: [-1]", "[5]", (2, 5)),
    ],
)
def test_a_reshape_of_the_config_is_applied(load: Any, io: str, dims: str, shape: tuple[int, ...]) -> None:
    assert load(io, dims=dims) == ("", [str({"x": shape})])


def test_a_tensor_that_is_no_input_joins_the_others(load: Any) -> None:
    control = 'inputs { key: "START" value { data_type: TYPE_INT32 dims: [1] zero_data: true } }'
    assert load("dims: [3]", dims="[3]", more=control) == ("", [str({"START": (2, 1), "x": (2, 3)})])


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"dims": "[4]"}, "unexpected shape for input 'x' for model 'm'. Expected [-1,3], got [1,4]. NOTE: Setting"),
        (
            {"dims": "[3]", "type": "TYPE_INT32"},
            "inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            {"dims": "[3]", "name": "other"},
            "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['x'].",
        ),
    ],
)
def test_sample_that_no_client_could_send_fails_the_load_with_its_name(
    load: Any, sample: dict[str, str], reason: str
) -> None:
    result, seen = load("dims: [3]", **sample)
    assert result.startswith(LEAD + reason)
    assert seen == []
