"""Every engine's outputs of every data type are inputs of every other engine, and of itself.

NumPy has several dtypes for one type: ``longlong`` equals ``int64``, and engines refuse one or the other. Models
are identities: the oracle is the sent tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import openvino
import pytest
from onnx import helper
from openvino import opset13

from headrace import BytesTensor, InferResponse, Server, Tensor, as_tensor, dtypes
from headrace_testing.serving import serve

tf = pytest.importorskip("tensorflow")
pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript, about itself

Array = npt.NDArray[Any]
TYPES = {datatype.name: datatype for datatype in dtypes.ALL}
NUMBERS = [name for name in TYPES if name != "BYTES"]
SIZE = 6


def write_onnx(version: Path, names: list[str]) -> None:
    kinds = {**{name: helper.np_dtype_to_tensor_dtype(TYPES[name].numpy) for name in NUMBERS}, "BYTES": 8}
    infos = {name: (kinds[name], [SIZE]) for name in names}
    graph = helper.make_graph(
        [helper.make_node("Identity", [f"{name}_in"], [f"{name}_out"]) for name in names],
        "g",
        [helper.make_tensor_value_info(f"{name}_in", *io) for name, io in infos.items()],
        [helper.make_tensor_value_info(f"{name}_out", *io) for name, io in infos.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), version / "model.onnx"
    )


def write_openvino(version: Path, names: list[str]) -> None:
    kinds = {"BOOL": "boolean", "BF16": "bf16"}
    parameters, results = [], []
    for name in names:
        kind = kinds.get(name, name.replace("UINT", "u").replace("INT", "i").replace("FP", "f"))
        parameters.append(opset13.parameter([SIZE], getattr(openvino.Type, kind)))
        parameters[-1].output(0).set_names({f"{name}_in"})
        results.append(opset13.reshape(parameters[-1], opset13.constant([SIZE], openvino.Type.i64), False))
        results[-1].output(0).set_names({f"{name}_out"})
    openvino.save_model(openvino.Model(results, parameters), str(version / "model.xml"), compress_to_fp16=False)


def write_torch(version: Path, names: list[str]) -> None:
    import torch

    class Identity(torch.nn.Module):
        def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name.replace("_in", "_out"): tensor.clone() for name, tensor in tensors.items()}

    torch.jit.script(Identity()).save(str(version / "model.pt"))  # type: ignore[no-untyped-call]


def write_tensorflow(version: Path, names: list[str]) -> None:
    def identity(**tensors: Any) -> dict[str, Any]:
        return {name.replace("_in", "_out"): tf.identity(tensor) for name, tensor in tensors.items()}

    kinds = {"BYTES": tf.string, "BF16": tf.bfloat16}
    module = tf.Module()
    takes = {f"{name}_in": tf.TensorSpec([SIZE], kinds.get(name) or TYPES[name].numpy, f"{name}_in") for name in names}
    module.run = tf.function(identity).get_concrete_function(**takes)
    tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.run)


def write_python(version: Path, names: list[str]) -> None:
    (version / "model.py").write_text("""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor.from_dlpack(t.name()[:-3] + "_out", t) if t.triton_dtype() == 14
                 else pb_utils.Tensor(t.name()[:-3] + "_out", t.as_numpy()) for t in request.inputs()]
            )
            for request in requests
        ]
""")


def write_identity(version: Path, names: list[str]) -> None:
    """The backend of core has no files."""


#: Per engine the backend's name, its writer, and the types that it does not carry.
ENGINES: Mapping[str, tuple[str, Callable[[Path, list[str]], None], set[str]]] = {
    "onnx": ("onnxruntime", write_onnx, {"BF16"}),  # it takes strings or BF16
    "onnx_bf16": ("onnxruntime", write_onnx, {"BYTES"}),
    "openvino": ("openvino", write_openvino, {"BYTES"}),
    "torch": ("pytorch", write_torch, {"BYTES"}),
    "tf": ("tensorflow", write_tensorflow, set()),
    "python": ("python", write_python, set()),
    "identity": ("identity", write_identity, set()),
}


def carried(engine: str) -> list[str]:
    return [name for name in TYPES if name not in ENGINES[engine][2]]


def io(field: str, names: list[str]) -> str:
    """The inputs or outputs of a config, one for each data type."""
    end = {"input": "in", "output": "out"}[field]
    return "".join(
        f'{field} {{ name: "{name}_{end}" data_type: {TYPES[name].config_name} dims: [{SIZE}] }}\n' for name in names
    )


def maps(field: str, ends: Mapping[str, str]) -> str:
    end = {"input_map": "in", "output_map": "out"}[field]
    return "".join(f'{field} {{ key: "{name}_{end}" value: "{name}_{to}" }}\n' for name, to in ends.items())


def ensemble(first: str, second: str) -> str:
    """``second`` after ``first``, for every type that both carry."""
    both = [name for name in carried(first) if name in carried(second)]
    reads = {name: "between" if name in both else "in" for name in carried(second)}
    steps = (
        (
            first,
            maps("input_map", dict.fromkeys(carried(first), "in")) + maps("output_map", dict.fromkeys(both, "between")),
        ),
        (second, maps("input_map", reads) + maps("output_map", dict.fromkeys(carried(second), "out"))),
    )
    taken = [name for name in TYPES if name in {*carried(first), *carried(second)}]
    listed = "".join(f'step {{ model_name: "{model}" model_version: -1\n{mapped}}}\n' for model, mapped in steps)
    return (
        f'platform: "ensemble"\n{io("input", taken)}{io("output", carried(second))}ensemble_scheduling {{ {listed} }}'
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of every engine, and an ensemble of every two."""
    root = tmp_path_factory.mktemp("repository")
    configs = {f"{first}-{second}": ensemble(first, second) for first, second in product(ENGINES, ENGINES)}
    for engine, (backend, write, _) in ENGINES.items():
        (root / engine / "1").mkdir(parents=True)
        write(root / engine / "1", carried(engine))
        names = carried(engine)
        configs[engine] = f'backend: "{backend}"\n{io("input", names)}{io("output", names)}'
        if engine == "python":  # so that arrays pass as they are, and are not written to another process
            configs[engine] += 'parameters { key: "isolation" value { string_value: "thread" } }'
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True, exist_ok=True)
        (root / name / "config.pbtxt").write_text(config)
    with serve(root) as running:
        yield running


def sent(names: list[str]) -> dict[str, Tensor]:
    """A tensor of each type, with the ends of its range; INT64 and UINT64 within INT32, as which OpenVINO computes."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        dtype = TYPES[name].numpy
        if name == "BYTES":
            tensors[name] = as_tensor(["", "a", "\u00e9", "long" * 9, "\0", "z"])
        elif dtype.kind in "iu":
            bits = min(8 * dtype.itemsize, 31 if name == "UINT64" else 32) - (dtype.kind == "i")
            tensors[name] = np.array([-(2**bits) if dtype.kind == "i" else 0, 0, 1, 2, 3, 2**bits - 1], dtype)
        else:
            tensors[name] = np.array([0, 1, 0, 1, 1, 0] if name == "BOOL" else [-1.5, 0, 1, 2, 0.25, 96], dtype)
    return tensors


def check(response: InferResponse, names: list[str], sent_tensors: Mapping[str, Tensor]) -> None:
    for name in names:
        actual, expected = response.outputs[f"{name}_out"], sent_tensors[name]
        if isinstance(expected, BytesTensor):
            assert isinstance(actual, BytesTensor)
            assert actual.items() == expected.items()
        else:
            assert isinstance(actual, np.ndarray)
            assert actual.dtype is TYPES[name].numpy, "the same object, not only an equal one"
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("first", ENGINES)
def test_outputs_of_one_engine_are_inputs_of_another(server: Server, first: str, second: str) -> None:
    tensors = sent([*TYPES])
    taken = {f"{name}_in": tensors[name] for name in {*carried(first), *carried(second)}}
    check(server.infer(f"{first}-{second}", taken), carried(second), tensors)


class Subclass(np.ndarray[Any, Any]):
    """Such as ``np.memmap``."""


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


#: ``long`` and ``longlong`` have 64 bits on Linux; one of them is ``int64``.
OTHERS: Mapping[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(size): np.dtype(other)
    for size, kinds in (("i8", "lq"), ("u8", "LQ"))
    for other in kinds
    if np.dtype(other) is not np.dtype(size)
}
FORMS: Mapping[str, Callable[[Array], Array]] = {
    "the other dtype of this size": lambda array: array.view(OTHERS.get(array.dtype, array.dtype)),
    "a dtype with metadata": lambda array: array.view(np.dtype(array.dtype, metadata={"unit": "m"})),
    "the other byte order": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "backwards in memory": lambda array: array[::-1].copy()[::-1],
    "every other element": lambda array: np.repeat(array, 2)[::2],
    "read-only": lambda array: _read_only(array.copy()),
    "a subclass": lambda array: array.view(Subclass),
    "at an odd address": lambda array: np.frombuffer(b"." + array.tobytes(), np.uint8)[1:].view(array.dtype),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_takes_arrays_of_any_form(server: Server, engine: str, form: str) -> None:
    tensors = sent(carried(engine))
    taken = {
        f"{name}_in": FORMS[form](tensor) if isinstance(tensor, np.ndarray) else tensor
        for name, tensor in tensors.items()
    }
    check(server.infer(engine, taken), carried(engine), tensors)


def test_there_are_two_dtypes_of_64_bits() -> None:
    assert {each.name for each in OTHERS.values()} <= {"int64", "uint64", "longlong", "ulonglong"}
    assert len(OTHERS) == 2
