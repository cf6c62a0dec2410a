"""How an instance runs: an infer request of its own on the compiled model that all instances share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, Instance, InvalidArgument, Model, Tensor, Tensors, dtypes
from headrace_openvino.compiled_model import reword
from headrace_openvino.ports import fixed_batch, graph_of, names_of


class OpenVinoInstance(Instance):
    """Runs an infer request with NumPy arrays on both sides. Inputs are used in place, outputs are fresh."""

    def __init__(self, openvino: Any, model: Model, compiled: Any) -> None:
        config, graph = model.config, graph_of(compiled, model.config)
        self._openvino = openvino
        self._request = compiled.create_infer_request()
        self._inputs, self._outputs = names_of(compiled.inputs, config), names_of(compiled.outputs, config)
        self._rows = fixed_batch(compiled, config)
        self._pads = model.parameters.enable_batch_padding
        dims = {io.name: tuple(io.reshape.shape) if io.HasField("reshape") else tuple(io.dims) for io in config.output}
        self._scalar_inputs = [name for name in self._inputs if not graph.inputs[name].shape]
        self._scalar_outputs = {
            name: dims[name] for name in self._outputs if not graph.outputs[name].shape and name in dims
        }
        self._bfloat16 = [name for name in self._outputs if graph.outputs[name].datatype is dtypes.BF16]
        bfloat16_inputs = any(graph.inputs[name].datatype is dtypes.BF16 for name in self._inputs)
        self._is_plain = not (self._scalar_inputs or bfloat16_inputs or self._rows)
        # A single stream executes on the thread that calls; several hand over to threads of OpenVINO's.
        self.any_thread = model.parameters.target_device == "CPU" and compiled.get_property("NUM_STREAMS") == 1

    def execute(self, inputs: Tensors) -> Tensors:
        feed: list[Any] = [inputs[name] for name in self._inputs]
        rows = 0
        if not self._is_plain:
            rows = len(feed[0]) if self._rows else 0
            feed = [self._prepare(name, tensor) for name, tensor in zip(self._inputs, feed, strict=True)]
        try:
            results = self._request.infer(feed, share_inputs=True).to_tuple()
        except Exception as error:  # pybind raises classes of its own
            raise BackendError(reword(error), Code.INTERNAL) from error
        outputs = dict(zip(self._outputs, results, strict=True))
        if rows != self._rows:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        for name in self._bfloat16:  # OpenVINO shows its memory as FP16
            outputs[name] = outputs[name].view(dtypes.BF16.numpy)
        for name, shape in self._scalar_outputs.items():
            outputs[name] = np.asarray(outputs[name]).reshape(shape)
        return outputs

    def close(self) -> None:
        del self._request

    def _prepare(self, name: str, tensor: Tensor) -> Any:
        array: npt.NDArray[Any] = np.asarray(tensor)
        if self._rows and len(array) != self._rows:
            array = self._pad(array)
        if name in self._scalar_inputs:
            array = array.reshape(())
        if array.dtype != dtypes.BF16.numpy:
            return array
        bits = np.ascontiguousarray(array).view(np.uint16)
        return self._openvino.Tensor(bits, self._openvino.Shape(array.shape), self._openvino.Type.bf16)

    def _pad(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not self._pads:
            raise InvalidArgument(
                f"expected requests with batch size '{self._rows}', got '{len(array)}'; the parameter "
                "ENABLE_BATCH_PADDING fills smaller batches up"
            )
        padded = np.zeros((self._rows, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        return padded
