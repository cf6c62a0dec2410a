"""Write the models of the benchmarks: ``python benchmarks/models.py DIR``. Needs ``onnx``.

- ``identity``: Headrace's own backend, FP32 ``INPUT0`` [-1] to ``OUTPUT0``
- ``pyident``: the same as a Python model, which the real Triton can serve, too
- ``identity_cached``, ``pyident_cached``: the same, answered from the response cache of a server that has one
- ``three_identities``, ``three_pyidents``: ensembles of three of these, copies of each other, in a row;
  ``two_identities``, ``two_pyidents``: of two
- ``identity_direct``, ``identity_oldest``, ``pyident_direct``: the same identities, for sequences;
  ``identity_controls`` gets START, READY and the id
- ``tiny_add``: ONNX, sum and difference of two FP32 [16]
- ``running_sum``: ONNX, FP32 [16] added to an implicit state; ``doubled``: the same graph for single requests, which
  adds its input to itself
- ``mlp``: ONNX, FP32 [256] through 1024 and 1024 to 10
- ``pymlp``: the same sizes as a Python model, which computes a batch at a time with NumPy
- ``convnet``: ONNX, FP32 [3, 224, 224], a ResNet-18 in size and shape: about 1.8 GFLOP

All batch up to 64 requests (``convnet``: 16). Weights are random, and the same every time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
#: Ensembles and their models: copies of one, each with its own instance.
ENSEMBLES = {
    "three_identities": ("identity", "identity2", "identity3"),
    "three_pyidents": ("pyident", "pyident2", "pyident3"),
    "two_identities": ("identity", "identity2"),
    "two_pyidents": ("pyident", "pyident2"),
}
#: The threads of every ONNX model, so that the compared programs compute the same way.
THREADS = 1
_IDENTITY = 'backend: "identity"\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n'
_ONNX = f"""\
backend: "onnxruntime"
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "{THREADS}" }} }}
parameters {{ key: "inter_op_thread_count" value {{ string_value: "1" }} }}
"""
_DIRECT = "sequence_batching { direct { } }"
_CONTROLS = """\
sequence_batching { direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }"""
_STATE = """\
sequence_batching { direct { }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 16 ] } }"""
_PYTHON = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.as_numpy())]) for each in inputs]
"""
_PYTHON_MLP = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        rng = np.random.default_rng(0)
        self.weights = [
            rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
            for shape in ((256, 1024), (1024, 1024), (1024, 10))
        ]

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        x = np.concatenate(inputs) if len(inputs) > 1 else inputs[0]
        first, second, third = self.weights
        x = np.maximum(np.maximum(x @ first, 0) @ second, 0) @ third
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", rows)]) for rows in np.split(x, ends)]
"""


def write_models(folder: Path) -> Path:
    """Write the model repository to ``folder``, and return it. Takes a few seconds and 50 MiB."""
    rng = np.random.default_rng(0)
    _write_tiny_add(folder)
    _write_sums(folder)
    _write_mlp(folder, rng)
    _write_convnet(folder, rng)
    vector = ["INPUT0"], ["OUTPUT0"], [-1]
    for number in ("", "2", "3"):
        _config(folder, f"identity{number}", _IDENTITY, *vector)
        directory = _config(folder, f"pyident{number}", 'backend: "python"\n', *vector)
        (directory / "model.py").write_text(_PYTHON)
    for name, batching in (
        ("direct", _DIRECT), ("oldest", "sequence_batching { oldest { } }"), ("controls", _CONTROLS),
    ):  # fmt: skip
        _config(folder, f"identity_{name}", _IDENTITY, *vector, batching=batching)
    cached = "dynamic_batching { }\nresponse_cache { enable: true }"
    _config(folder, "identity_cached", _IDENTITY, *vector, batching=cached)
    for name, batching in (("direct", _DIRECT), ("cached", cached)):
        directory = _config(folder, f"pyident_{name}", 'backend: "python"\n', *vector, batching=batching)
        (directory / "model.py").write_text(_PYTHON)
    directory = _config(folder, "pymlp", 'backend: "python"\n', ["INPUT0"], ["OUTPUT0"], [256], [10])
    (directory / "model.py").write_text(_PYTHON_MLP)
    for name, models in ENSEMBLES.items():
        _write_ensemble(folder, name, models)
    return folder


def _write_ensemble(folder: Path, name: str, models: Sequence[str]) -> None:
    """Return the ensemble of ``models``, identities, one after the other."""
    tensors = ["INPUT0", *(f"between{number}" for number in range(1, len(models))), "OUTPUT0"]
    described = ", ".join(
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "INPUT0" value: "{reads}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{writes}" }} }}'
        for model, (reads, writes) in zip(models, pairwise(tensors), strict=True)
    )
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    (folder / name / "config.pbtxt").write_text(
        f'name: "{name}"\nplatform: "ensemble"\nmax_batch_size: 64\n'
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }\n'
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }\n'
        f"ensemble_scheduling {{ step [ {described} ] }}\n"
    )


def _write_tiny_add(folder: Path) -> None:
    inputs, outputs = ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"]
    nodes = [helper.make_node(op, inputs, [output]) for op, output in zip(("Add", "Sub"), outputs, strict=True)]
    directory = _config(folder, "tiny_add", _ONNX, inputs, outputs, [16])
    _save(directory, nodes, [_row(name, 16) for name in inputs], [_row(name, 16) for name in outputs], [])


def _write_sums(folder: Path) -> None:
    """Return the model with two additions: of the input and the state, or of the input and itself."""
    for name, other, batching in (("running_sum", "before", _STATE), ("doubled", "INPUT0", "dynamic_batching { }")):
        outputs = ["OUTPUT0", "after"][: 2 if name == "running_sum" else 1]
        nodes = [helper.make_node("Add", ["INPUT0", other], [output]) for output in ("OUTPUT0", "after")]
        directory = _config(folder, name, _ONNX, ["INPUT0"], ["OUTPUT0"], [16], batching=batching)
        inputs = [_row(each, 16) for each in dict.fromkeys(("INPUT0", other))]
        _save(directory, nodes, inputs, [_row(each, 16) for each in outputs], [])


def _write_mlp(folder: Path, rng: np.random.Generator) -> None:
    nodes, weights, x = [], [], "INPUT0"
    for layer, (rows, columns) in enumerate([(256, 1024), (1024, 1024), (1024, 10)]):
        weights.append(_weights(f"w{layer}", rng.standard_normal((rows, columns)) / math.sqrt(rows)))
        weights.append(_weights(f"b{layer}", rng.standard_normal(columns) * 0.01))
        y = "OUTPUT0" if layer == 2 else f"h{layer}"
        nodes.append(helper.make_node("Gemm", [x, f"w{layer}", f"b{layer}"], [y]))
        if layer < 2:
            x = f"r{layer}"
            nodes.append(helper.make_node("Relu", [y], [x]))
    directory = _config(folder, "mlp", _ONNX, ["INPUT0"], ["OUTPUT0"], [256], [10])
    _save(directory, nodes, [_row("INPUT0", 256)], [_row("OUTPUT0", 10)], weights)


def _write_convnet(folder: Path, rng: np.random.Generator) -> None:
    nodes: list[Any] = []
    weights: list[Any] = []

    def convolve(x: str, channels: int, filters: int, kernel: int, stride: int, *, relu: bool = True) -> str:
        name = f"{len(weights) // 2}"
        scale = math.sqrt(2 / (channels * kernel * kernel))
        weights.append(_weights(f"w{name}", rng.standard_normal((filters, channels, kernel, kernel)) * scale))
        weights.append(_weights(f"b{name}", np.zeros(filters)))
        shape: dict[str, Any] = {
            "kernel_shape": [kernel, kernel],
            "strides": [stride, stride],
            "pads": [kernel // 2] * 4,
        }
        nodes.append(helper.make_node("Conv", [x, f"w{name}", f"b{name}"], [f"c{name}"], **shape))
        if not relu:
            return f"c{name}"
        nodes.append(helper.make_node("Relu", [f"c{name}"], [f"r{name}"]))
        return f"r{name}"

    first, x = convolve("INPUT0", 3, 64, 7, 2), "pooled"
    nodes.append(helper.make_node("MaxPool", [first], [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]))
    channels = 64
    for stage, filters in enumerate([64, 128, 256, 512]):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = convolve(convolve(x, channels, filters, 3, stride), filters, filters, 3, 1, relu=False)
            same = stride == 1 and channels == filters
            shortcut = x if same else convolve(x, channels, filters, 1, stride, relu=False)
            nodes.append(helper.make_node("Add", [y, shortcut], [f"a{stage}{block}"]))
            x, channels = f"s{stage}{block}", filters
            nodes.append(helper.make_node("Relu", [f"a{stage}{block}"], [x]))
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["averaged"]))
    nodes.append(helper.make_node("Flatten", ["averaged"], ["flat"], axis=1))
    nodes.append(helper.make_node("Gemm", ["flat", "fw", "fb"], ["OUTPUT0"]))
    weights.append(_weights("fw", rng.standard_normal((512, 1000)) * 0.04))
    weights.append(_weights("fb", np.zeros(1000)))
    directory = _config(folder, "convnet", _ONNX, ["INPUT0"], ["OUTPUT0"], [3, 224, 224], [1000], 16)
    _save(directory, nodes, [_row("INPUT0", 3, 224, 224)], [_row("OUTPUT0", 1000)], weights)


def _config(
    folder: Path, name: str, head: str, inputs: Sequence[str], outputs: Sequence[str], dims: Sequence[int],
    output_dims: Sequence[int] = (), max_batch_size: int = 64, batching: str = "dynamic_batching { }",
) -> Path:  # fmt: skip
    """Write the config of a model. Return its version directory. Outputs have ``dims`` unless they have their own."""
    directory = folder / name / "1"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = [("input", each, dims) for each in inputs] + [("output", each, output_dims or dims) for each in outputs]
    described = [
        f'{kind} {{ name: "{each}" data_type: TYPE_FP32 dims: [ {", ".join(map(str, shape))} ] }}\n'
        for kind, each, shape in tensors
    ]
    text = f'name: "{name}"\nmax_batch_size: {max_batch_size}\n{head}{"".join(described)}{batching}\n'
    (folder / name / "config.pbtxt").write_text(text)
    return directory


def _save(directory: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> None:
    graph = helper.make_graph(nodes, directory.parent.name, inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(directory / "model.onnx"))


def _row(name: str, *dims: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", *dims])


def _weights(name: str, values: Any) -> Any:
    return numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)


if __name__ == "__main__":
    print(write_models(Path(sys.argv[1])))
