"""The executions of an instance: the plain way, with BF16, and on a GPU.

Measured for two f32[1, 16] inputs and two outputs on the CPU: ``session.run`` takes 6 us, an IO binding 11 us,
OrtValues 41 us. So the CPU uses ``run``, and OrtValues only for types that ``run`` cannot carry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import (
    BackendError,
    BytesTensor,
    Code,
    HeadraceError,
    Instance,
    InvalidArgument,
    ModelConfig,
    Tensor,
    Tensors,
    dtypes,
)
from headrace_engines import Graph
from headrace_onnx.device_binding import DeviceBinding, Execution
from headrace_onnx.session import reword

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps around ``Run``, decided at load from config and graph.

    ``scalar_outputs`` maps outputs of rank 0 to the dims in the config. ``repeats``: a run may never end, so it is not
    for the event loop.
    """

    outputs: list[str]
    string_inputs: tuple[str, ...]
    scalar_inputs: tuple[str, ...]
    scalar_outputs: Mapping[str, tuple[int, ...]]
    has_bfloat16: bool
    repeats: bool

    @classmethod
    def of(cls, config: ModelConfig, graph: Graph, repeats: bool = False) -> Plan:
        configured, known = Graph.of_config(config), {**graph.inputs, **graph.optional}
        inputs = [known[name] for name in configured.inputs]
        outputs = [graph.outputs[name] for name in configured.outputs]
        return cls(
            list(configured.outputs),
            tuple(info.name for info in inputs if info.datatype is dtypes.BYTES),
            tuple(info.name for info in inputs if not info.shape),
            {info.name: configured.outputs[info.name].shape for info in outputs if not info.shape},
            any(info.datatype is dtypes.BF16 for info in [*inputs, *outputs]),
            repeats,
        )

    @property
    def is_plain(self) -> bool:
        """True if arrays can be passed to the engine and back unchanged."""
        return not (self.string_inputs or self.scalar_inputs or self.scalar_outputs)


class OnnxInstance(Instance):
    """Runs a session with NumPy arrays on both sides. Outputs are fresh for every call."""

    def __init__(self, session: Any, plan: Plan, run_options: Any) -> None:
        self.any_thread = not plan.repeats  # ``Run`` of a session may be called by any thread
        self._session: Any = session
        self._run: Callable[..., Sequence[Any]] = session.run
        self._plan = plan
        self._names = plan.outputs
        self._is_plain = plan.is_plain
        self._options = run_options

    def execute(self, inputs: Tensors) -> Tensors:
        feed = inputs if self._is_plain else self._feed(inputs)
        try:
            results = self._run(self._names, feed, self._options)
        except Exception as error:  # pybind has its own exception classes
            raise failure(error) from error
        outputs = dict(zip(self._names, results, strict=True))
        if not self._is_plain:
            self._undo_scalars(outputs)
        return outputs

    def close(self) -> None:
        del self._session, self._run

    def _feed(self, inputs: Tensors) -> dict[str, Any]:
        feed: dict[str, Any] = dict(inputs)
        for name in self._plan.string_inputs:
            if name in feed:
                feed[name] = text_array(name, feed[name])
        for name in self._plan.scalar_inputs:
            if name in feed:
                feed[name] = feed[name].reshape(())
        return feed

    def _undo_scalars(self, outputs: dict[str, Any]) -> None:
        for name, dims in self._plan.scalar_outputs.items():
            outputs[name] = np.asarray(outputs[name]).reshape(dims)


class OrtValueInstance(OnnxInstance):
    """Runs a session that takes or gives BF16, which ``session.run`` cannot carry.

    Inputs are used in place; BF16 outputs are copied once.
    """

    def __init__(self, session: Any, plan: Plan, run_options: Any, ort_value: Any) -> None:
        super().__init__(session, plan, run_options)
        self._run = self._run_values
        self._ort_value = ort_value

    def _run_values(self, names: list[str], feed: Mapping[str, Any], options: Any) -> list[Any]:
        # ``feed`` keeps the arrays alive while the values refer to them.
        contiguous = {name: np.ascontiguousarray(array) for name, array in feed.items()}
        values = {name: self._value(array) for name, array in contiguous.items()}
        return [_array(value) for value in self._session.run_with_ort_values(names, values, options)]

    def _value(self, array: npt.NDArray[Any]) -> Any:
        if array.dtype == dtypes.BF16.numpy:
            return self._ort_value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
        return self._ort_value.ortvalue_from_numpy(array)


class DeviceInstance(OnnxInstance):
    """Runs a session on a GPU by an IO binding. Inputs may be on the GPU; outputs stay there. No input is BYTES."""

    takes_device_tensors = True

    def __init__(self, session: Any, plan: Plan, run_options: Any, device: DeviceBinding) -> None:
        super().__init__(session, plan, run_options)
        self.any_thread = False  # a wait for a GPU must not block the event loop
        self._run = self._run_bound
        self._device = device
        self._on_host = {node.name for node in session.get_outputs() if node.type == "tensor(string)"}
        #: NumPy has no BF16, so the engine copies none to the host.
        self._fetches = not plan.has_bfloat16
        self._places = {name: ("cpu", 0) if name in self._on_host else device.where for name in plan.outputs}

    def close(self) -> None:
        super().close()
        self._device.close()

    def _run_bound(self, names: list[str], feed: Mapping[str, Any], options: Any) -> list[Any]:
        execution = Execution(self._device)
        try:
            for name, tensor in feed.items():
                execution.input(name, tensor)
            for name, place in self._places.items():
                execution.binding.bind_output(name, *place)
            execution.begin()
            self._session.run_with_iobinding(execution.binding, options)
            if self._fetches and not self.wants_device_tensors:
                fetched: list[Any] = execution.binding.copy_outputs_to_cpu()
                return fetched
            values = zip(names, execution.binding.get_outputs(), strict=True)
            return [value.numpy() if name in self._on_host else execution.output(value) for name, value in values]
        finally:
            execution.end()

    def _undo_scalars(self, outputs: dict[str, Any]) -> None:
        for name, dims in self._plan.scalar_outputs.items():
            outputs[name] = outputs[name].reshape(dims)


def text_array(name: str, tensor: Tensor) -> npt.NDArray[np.object_]:
    """Return ``tensor`` as an object array of ``str``, the engine's type.

    Boxes every string. Raises `InvalidArgument` naming the element that is not UTF-8.
    """
    if not isinstance(tensor, BytesTensor):
        raise BackendError(f"input '{name}' is {tensor.dtype}, not BYTES")
    items = tensor.items()
    array = np.empty(len(items), dtype=np.object_)
    try:
        array[:] = [item.decode() for item in items]
    except UnicodeDecodeError:
        index = next(index for index, item in enumerate(items) if not _is_text(item))
        raise InvalidArgument(
            f"input '{name}': string element {index} is not UTF-8, but ONNX strings are text"
        ) from None
    return array.reshape(tensor.shape)


def failure(error: Exception) -> HeadraceError:
    """Return the error of a failed ``Run`` for the caller."""
    if isinstance(error, HeadraceError):
        return error
    return BackendError(reword(error), Code.INTERNAL)


def _array(value: Any) -> npt.NDArray[Any]:
    """Return the elements of an OrtValue. BF16, which NumPy lacks, is copied from its memory."""
    array: npt.NDArray[Any]
    if value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return array
    size = value.tensor_size_in_bytes()
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    array = np.frombuffer(raw, dtype=dtypes.BF16.numpy).reshape(value.shape())
    return array


def _is_text(item: bytes) -> bool:
    try:
        item.decode()
    except UnicodeDecodeError:
        return False
    return True
