"""Converts tensors of requests to PyTorch's, and PyTorch's results to arrays, where possible without a copy.

An array is copied if it has gaps, or if the model may write to its inputs, which other models of an ensemble may read.
BF16 passes as its bits, since NumPy and PyTorch cannot exchange that type. Strings are ``list[str]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import BackendError, BytesTensor, Code, DeviceTensor, InvalidArgument, StackedTensors, Tensor, dtypes
from headrace_torch.torch_tensors import Borrowing, TorchTensor, as_array, as_torch, mark_complete, numpy_types, stays

if TYPE_CHECKING:
    from headrace_torch.gpu_calls import GpuCalls


class TensorConverter:
    """Converts the inputs and the results of one instance, which computes on ``device``, one of PyTorch's names.

    - ``outputs`` maps each output of the config to the index of its result, from 0.
    - ``writes``: the model may write to its inputs.
    - ``state_memory``: the addresses that the function `state_memory` returns; results in this memory are copied.
    - ``reuses``: the next execution may write to the memory of results on a GPU.
    - ``calls`` copies arrays to a GPU. Results on a GPU stay there, as `TorchTensor`.
    """

    def __init__(
        self,
        torch: Any,
        device: str,
        outputs: Mapping[str, int],
        writes: bool,
        state_memory: frozenset[int] = frozenset(),
        reuses: bool = False,
        calls: GpuCalls | None = None,
    ) -> None:
        self._torch, self._device, self._outputs, self._state_memory = torch, device, outputs, state_memory
        self._writes, self._reuses, self._calls = writes, reuses, calls
        self._copies = writes and device == "cpu"  # inputs for other devices are copied anyway
        #: True if results stay on the device.
        self.results_stay = stays(device)
        self._types = numpy_types(torch) if self.results_stay else {}
        self._count = max(outputs.values()) + 1
        self._borrowing = Borrowing() if device.startswith("cuda") else None

    def tensor(self, name: str, tensor: Tensor) -> Any:
        """Return the input ``name`` for PyTorch; strings become ``list[str]``.

        Raises `InvalidArgument` for strings that are not UTF-8, or that have more than one dim."""
        if type(tensor) is not np.ndarray:
            return self._other(name, tensor)
        array = tensor
        if self._copies or not array.flags.c_contiguous:
            array = array.copy()
        if self._calls is not None:
            return self._calls.to_device(array)
        if array.dtype == dtypes.BF16.numpy:
            value = self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        else:
            value = self._torch.from_numpy(array)
        return value if self._device == "cpu" else value.to(self._device)

    def _other(self, name: str, tensor: Any) -> Any:
        if isinstance(tensor, BytesTensor):
            return texts(name, tensor)
        if type(tensor) is StackedTensors and all(type(part) is np.ndarray for part in tensor.parts):
            return self.tensor(name, tensor.to_host()) if self._calls is None else self._calls.to_device(tensor)
        if self._borrowing is not None:
            self._borrowing.add(tensor)
        value = as_torch(self._torch, tensor, self._device, partial(self._part, name))
        return value.clone() if self._writes and isinstance(tensor, DeviceTensor) else value

    def _part(self, name: str, tensor: Any) -> Any:
        part = self.tensor(name, tensor)
        return part if self._calls is None else self._calls.order(part)

    def results(self, result: Any) -> dict[str, Tensor]:
        """Return the results of the model by the config's names; results on a GPU are `TorchTensor`.

        Call it on the current stream of the execution. Raises `BackendError` for a missing output.
        """
        found = self._results(result)
        if self.results_stay and self._calls is None:
            mark_complete(self._torch, found.values())
        if self._borrowing:
            self._borrowing.keep(self._torch.cuda.current_stream(self._device), found.values())
        return found

    def _results(self, result: Any) -> dict[str, Tensor]:
        """Return `results` without events: of a dictionary by key, of a tuple or list by position, else output 0."""
        if isinstance(result, dict):
            missing = [name for name in self._outputs if name not in result]
            if missing:
                raise BackendError(
                    f"PyTorch execute failure: no output '{missing[0]}'; the model gives {', '.join(map(str, result))}",
                    Code.INTERNAL,
                )
            return {name: self.array(name, result[name]) for name in self._outputs}
        results = (result,) if self._is_one(result) else result
        if self._count > len(results):
            raise BackendError(
                f"PyTorch execute failure: the configuration expects output {self._count - 1}, the model "
                f"gives {len(results)} outputs",
                Code.INTERNAL,
            )
        return {name: self.array(name, results[place]) for name, place in self._outputs.items()}

    def _is_one(self, result: Any) -> bool:
        """True for one tensor or list of strings. If there is one output, an empty list is a list of strings."""
        if not isinstance(result, (tuple, list)):
            return True
        return isinstance(result[0], str) if result else isinstance(result, list) and len(self._outputs) == 1

    def array(self, name: str, value: Any) -> Tensor:
        """Return ``value``, a tensor on any device or a list of strings, as the output ``name``. A scalar becomes [1].

        Raises `BackendError` for values of other types."""
        if isinstance(value, list):
            return np.array(value, dtype=np.object_)
        if not isinstance(value, self._torch.Tensor):
            raise BackendError(
                f"output '{name}' is {type(value).__name__}, neither a tensor nor strings", Code.INTERNAL
            )
        value = value.detach()
        if not (self.results_stay and stays(str(value.device)) and value.dtype in self._types):
            value = self._outside_state(value.cpu())
            array = as_array(self._torch, value)
            return array.reshape(1) if not array.ndim else array
        value = value.clone() if self._reuses else self._outside_state(value)
        value = value.contiguous() if value.ndim else value.reshape(1)
        result: Any = TorchTensor(value, self._types[value.dtype])
        return result  # type: ignore[no-any-return]  # `BaseInstance.takes_device_tensors`

    def _outside_state(self, value: Any) -> Any:
        return (
            value.clone() if self._state_memory and value.untyped_storage().data_ptr() in self._state_memory else value
        )


def state_memory(module: Any) -> frozenset[int]:
    """Return the addresses of the buffers of ``module``, and of its other attributes that are tensors.

    A model may write to them between calls, for example to a counter, and may return them directly.
    """
    found: set[int] = set()
    for part in module.modules():
        for each in (*part.buffers(recurse=False), *vars(part).values()):
            try:
                found.add(each.untyped_storage().data_ptr())
            except (AttributeError, RuntimeError, NotImplementedError, ValueError):
                continue  # it is no tensor, or has no memory
    return frozenset(found - {0})


def texts(name: str, tensor: BytesTensor) -> list[str]:
    """Return the strings of ``tensor``, whose shape is [strings], or [strings, 1] where they are rows."""
    if tensor.ndim > 1 and tensor.size != tensor.shape[0]:
        raise InvalidArgument(
            f"Triton only supports 1 dimensional List of String as input for '{name}', not {list(tensor.shape)}"
        )
    try:
        return [item.decode() for item in tensor.items()]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{name}': a string is not UTF-8, but PyTorch's strings are text ({error})"
        ) from None
