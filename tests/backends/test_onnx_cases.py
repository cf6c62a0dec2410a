"""ONNX's own tests of backends, through both backends that read ONNX.

Each case is completed, loaded and executed as core does it: its config is empty, and `Signature` and `RowsRunner` stand
around the instance. Servers would cost ten times as much: 90 ms for each model.

What must be equal is derived, not listed. An answer must be what ONNX says. Otherwise the engine is called directly:
what it refuses may be refused, and what it computes must be given. One reason to refuse is Headrace's own: the protocol
has no sequences, no maps, no optional tensors and no types of less than 8 bits or of FP8.
"""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

from headrace import (
    Backend,
    BytesTensor,
    Device,
    HeadraceError,
    InferResponse,
    Instance,
    Model,
    ModelConfig,
    Tensor,
    as_tensor,
)
from headrace.config.derive import derive
from headrace.config.options import ServerOptions
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import RowsRunner
from headrace.messages.request import InferRequest
from headrace.messages.ticket import Ticket
from headrace.models.configuring import complete
from headrace.models.signature import Signature
from headrace.plugins import Plugins
from headrace.storage.local_storage import files_below

Values = Mapping[str, Any]

pytestmark = pytest.mark.timeout(600)


class Case(NamedTuple):
    """``inputs`` and ``outputs`` are in the order of the graph; sequences and optionals are lists or None."""

    name: str
    model: onnx.ModelProto
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @property
    def named_inputs(self) -> Values:
        """The inputs by name. Initializers may be inputs, too, and have values already."""
        graph = self.model.graph
        own = {each.name for each in graph.initializer} if len(graph.input) > len(self.inputs) else set()
        names = [info.name for info in graph.input if info.name not in own]
        return dict(zip(names, self.inputs, strict=False))

    @property
    def is_carried(self) -> bool:
        """True if the protocol has a type for every input and some output."""
        return all(map(_is_carried, self.model.graph.input)) and any(map(_is_carried, self.model.graph.output))

    @property
    def kind(self) -> frozenset[object]:
        """Return the features that a case covers: operators, and the types and ranks of inputs and outputs."""
        graph = self.model.graph
        operators = {(node.domain, node.op_type) for node in graph.node}
        taken, returned = ({(side, _kind_of(info)) for info in infos} for side, infos in
                        (("takes", graph.input), ("gives", graph.output)))  # fmt: skip
        return frozenset().union(operators, taken, returned)


def _is_carried(info: onnx.ValueInfoProto) -> bool:
    kinds = {*range(1, 14), onnx.TensorProto.BFLOAT16}
    return info.type.WhichOneof("value") == "tensor_type" and info.type.tensor_type.elem_type in kinds


def _kind_of(info: onnx.ValueInfoProto) -> tuple[object, ...]:
    tensor = info.type.tensor_type
    return info.type.WhichOneof("value"), tensor.elem_type, len(tensor.shape.dim)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return the cases of the package ``onnx``: 1,884 of single operators, 140 of graphs."""
    from onnx.backend.test import loader

    found: list[Case] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the values that are made
        for case in loader.load_model_tests(kind="node"):
            assert case.model is not None
            found += [Case(case.name, case.model, *data) for data in (case.data_sets or ())[:1]]
    for kind in ("simple", "pytorch-operator", "pytorch-converted"):
        for case in loader.load_model_tests(kind=kind):
            assert case.model_dir is not None
            model, data = onnx.load(f"{case.model_dir}/model.onnx"), Path(case.model_dir, "test_data_set_0")
            inputs = [_read(data / f"input_{n}.pb", info) for n, info in enumerate(model.graph.input)]
            outputs = [_read(data / f"output_{n}.pb", info) for n, info in enumerate(model.graph.output)]
            found.append(Case(case.name, model, [each for each in inputs if each is not None], outputs))
    return found


def _read(path: Path, info: onnx.ValueInfoProto) -> Any:
    if not path.exists() or info.type.WhichOneof("value") != "tensor_type":
        return None
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


# ---------------------------------------------------------------------------- through the backend


@cache
def plugins() -> Plugins:
    """The plugins of core, found once for all cases."""
    return Plugins.discover(())


def answer(backend: Backend, case: Case, folder: Path, parameters: Any, file: str) -> list[Any]:
    """Return the outputs in the order of the config, as core does. Raises `HeadraceError`."""
    version = folder / case.name / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(case.model.SerializeToString())
    config = ModelConfig(name=case.name, backend=backend.name, default_model_filename=file)
    config.instance_group.add(count=1)
    derive(config, version.parent.name, files_below(version.parent))
    model = Model(case.name, 1, version, config, parameters, device=Device("cpu"), instance_name=case.name)
    complete(model, backend, ServerOptions(), plugins())
    instance = backend.load(replace(model, shared=backend.share(model)))
    assert isinstance(instance, Instance)
    signature = Signature(case.name, config)
    inputs = {
        name: _wire(signature, name, value) for name, value in case.named_inputs.items() if name in signature.inputs
    }
    ticket = Ticket(InferRequest(case.name, inputs), lambda answer, final: None)
    signature.check(ticket)
    schema = OutputSchema(case.name, "1", signature.outputs, signature.batched, backend.outputs_as_given)
    (response,), _ = RowsRunner(schema, instance).run([ticket])
    if isinstance(response, HeadraceError):
        raise response
    assert isinstance(response, InferResponse)
    return list(response.outputs.values())


def _wire(signature: Signature, name: str, value: Any) -> Tensor:
    """``value`` as a request has it: a scalar, or one for each row, has an axis more."""
    array = np.asarray(value)
    if array.ndim + 1 == len(signature.wire_shape(signature.inputs[name])):
        array = array.reshape(*array.shape, 1)
    return as_tensor(array)


# ---------------------------------------------------------------------------- the engine itself


def onnx_runtime(case: Case) -> list[Any]:
    """Return the outputs of ONNX Runtime, called directly. Raises its errors."""
    import onnxruntime as ort

    options, run_options = ort.SessionOptions(), ort.RunOptions()
    options.intra_op_num_threads, options.log_severity_level, run_options.log_severity_level = 1, 4, 4
    session = ort.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {name: _bfloat16_value(ort, value) for name, value in case.named_inputs.items()}
    names = [info.name for info in session.get_outputs() if info.type.startswith("tensor(")]
    if not any(info.type == "tensor(bfloat16)" for info in session.get_outputs()):
        return list(session.run(names, values, run_options))
    values = {
        name: value if isinstance(value, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(value)
        for name, value in values.items()
    }
    return [_elements(value) for value in session.run_with_ort_values(names, values, run_options)]


def _bfloat16_value(ort: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != ml_dtypes.bfloat16:
        return value
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value.view(np.uint16), onnx.TensorProto.BFLOAT16)


def _elements(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(value.shape())


def openvino(case: Case) -> list[Any]:
    """Return the outputs of OpenVINO, called directly. Raises its errors, and KeyError for an input that it has
    renamed."""
    from openvino import Core, Tensor, Type

    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    core = Core()
    compiled = core.compile_model(core.read_model(case.model.SerializeToString()), "CPU", settings)
    request, arrays = compiled.create_infer_request(), []
    for index, port in enumerate(compiled.inputs):
        known = [name for name in port.get_names() if name in case.named_inputs]
        if not known:
            raise KeyError(f"{port.get_names()} are none of {case.named_inputs.keys()}")
        array = np.asarray(case.named_inputs[known[0]], order="C")
        arrays.append(array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array)
        request.set_input_tensor(index, Tensor(arrays[-1], array.shape, port.get_element_type()))
    results = request.infer(share_outputs=True).to_tuple()
    return [
        array.view(ml_dtypes.bfloat16) if port.get_element_type() == Type.bf16 else array.copy()
        for array, port in zip(results, compiled.outputs, strict=True)
    ]


# ---------------------------------------------------------------------------- what is right


def agree(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """True if all are equal but for rounding; a scalar may have the shape [1], and a row one axis more."""
    return len(found) == len(expected) and all(map(_agree, found, expected))


def _agree(found: Any, expected: Any) -> bool:
    first, second = _array(found), _array(expected)
    if second is None or first is None or first.dtype != second.dtype:
        return False
    if first.shape not in (second.shape, (*second.shape, 1)):
        return False
    if first.dtype.kind in "biuO":
        return bool(first.ravel().tolist() == second.ravel().tolist())
    first, second = (array.ravel().astype(np.float64) for array in (first, second))
    return bool(np.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True))


def _array(value: Any) -> npt.NDArray[Any] | None:
    if value is None or isinstance(value, list):
        return None
    tensor = value if isinstance(value, BytesTensor) else as_tensor(np.asarray(value))
    return tensor.to_objects() if isinstance(tensor, BytesTensor) else tensor


def verdict(case: Case, ask: Callable[[Case], list[Any]], direct: Callable[[Case], list[Any]]) -> str:
    """Why the answer to ``case`` is wrong, or nothing."""
    found, reason = None, ""
    try:
        found = ask(case)
    except HeadraceError as error:
        reason = f"refused: {error.message}"
    tensors = [value for info, value in zip(case.model.graph.output, case.outputs, strict=False) if _is_carried(info)]
    if found is not None and agree(found, tensors):
        return ""
    if found is None and not case.is_carried:
        return ""
    try:
        expected, again = direct(case), direct(case)
    except Exception:  # whatever the engine raises
        return ""
    if not agree(again, expected):  # it is random, or wrong in another way each time
        return ""
    return "" if found is not None and agree(found, expected) else reason or "another answer than the engine's"


def _that_show_more(kinds: dict[frozenset[object], Case]) -> dict[frozenset[object], Case]:
    """Return the ``kinds``, from the last on, that have a feature which none before them has."""
    found: dict[frozenset[object], Case] = {}
    seen: set[object] = set()
    for kind, case in reversed(kinds.items()):
        if not kind <= seen:
            found[kind] = case
            seen |= kind
    return found


@pytest.fixture
def silent() -> Iterator[None]:
    """Without a warning of every second model."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("silent")
def test_onnxruntime_computes_the_results_of_onnx(cases: list[Case], tmp_path: Path) -> None:
    from headrace_onnx import OnnxRuntime, Parameters

    backend, parameters = OnnxRuntime({}), Parameters(intra_op_thread_count=1)
    wrong = {
        case.name: verdict(case, lambda case: answer(backend, case, tmp_path, parameters, ""), onnx_runtime)
        for case in cases
    }
    assert not any(wrong.values()), "\n".join(f"{name}: {reason}" for name, reason in wrong.items() if reason)
    assert len(wrong) > 2000


@pytest.mark.usefixtures("silent")
def test_openvino_computes_the_results_of_onnx(cases: list[Case], tmp_path: Path) -> None:
    """One case of each kind: OpenVINO takes 50 ms to read, read again and compile one. In CI, only those that show an
    operator, a type or a rank that no case before them does. Functions that are written as graphs (``_expanded``) are
    the engine's matter."""
    pytest.importorskip("openvino")
    from headrace_openvino import OpenVino, Parameters

    backend, parameters = OpenVino({}), Parameters(inference_num_threads=1)
    kinds = {case.kind: case for case in reversed(cases) if not case.name.endswith("_expanded")}
    if os.environ.get("CI") == "true":
        kinds = _that_show_more(kinds)
    wrong = {
        case.name: verdict(case, lambda case: answer(backend, case, tmp_path, parameters, "model.onnx"), openvino)
        for case in kinds.values()
    }
    assert not any(wrong.values()), "\n".join(f"{name}: {reason}" for name, reason in wrong.items() if reason)
    assert len(wrong) > (200 if os.environ.get("CI") == "true" else 500)
