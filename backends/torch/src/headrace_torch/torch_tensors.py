"""Results that stay on a GPU, and tensors of other models there: by DLPack, with CUDA events between streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, DeviceTensor, StackedTensors, dtypes
from headrace_torch.torch_process import first_line

#: The data types that a result may have on a GPU, by PyTorch's names.
_NUMPY: Mapping[str, np.dtype[Any]] = {
    "bool": dtypes.BOOL.numpy,
    "uint8": dtypes.UINT8.numpy,
    "uint16": dtypes.UINT16.numpy,
    "uint32": dtypes.UINT32.numpy,
    "uint64": dtypes.UINT64.numpy,
    "int8": dtypes.INT8.numpy,
    "int16": dtypes.INT16.numpy,
    "int32": dtypes.INT32.numpy,
    "int64": dtypes.INT64.numpy,
    "float16": dtypes.FP16.numpy,
    "bfloat16": dtypes.BF16.numpy,
    "float32": dtypes.FP32.numpy,
    "float64": dtypes.FP64.numpy,
}
#: DLPack's numbers of devices.
_CPU, _CUDA = 1, 2


def numpy_types(torch: Any) -> dict[Any, np.dtype[Any]]:
    """Return the NumPy dtype of each of PyTorch's that a protocol has."""
    return {getattr(torch, name): dtype for name, dtype in _NUMPY.items() if hasattr(torch, name)}


def stays(device: str) -> bool:
    """True if results on ``device``, one of PyTorch's names, are not in the memory of the host."""
    return device != "cpu"


class TorchTensor(DeviceTensor):
    """A result of PyTorch, contiguous. ``stream`` computes it, and ``complete`` is a CUDA event there, behind it. Both
    are None on a device without streams. ``computation`` is that of `headrace_torch.gpu_calls`, if there is one."""

    __slots__ = ("borrowed", "complete", "computation", "stream", "tensor")

    def __init__(
        self, tensor: Any, dtype: np.dtype[Any], stream: Any = None, complete: Any = None, computation: Any = None
    ) -> None:
        super().__init__(tensor.shape, dtype)
        self.tensor, self.stream, self.complete, self.computation = tensor, stream, complete, computation
        #: A `headrace_torch.borrowed_tensors.Borrowed`: the tensors that are read to compute it.
        self.borrowed: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.tensor.__dlpack_device__()
        return int(kind), number

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if self.complete is None:
            return self.tensor.__dlpack__(**options)
        torch: Any = sys.modules["torch"]
        device = self.tensor.device
        with torch.inference_mode(), torch.cuda.device(device):
            if stream in (None, 0, 1):
                self.order(torch.cuda.default_stream(device))
            elif stream != -1:  # else the reader waits by itself
                # Not `order`: the allocator would keep the stream, which its owner may destroy before the tensor.
                torch.cuda.ExternalStream(stream, device).wait_event(self.complete)
            return self.tensor.__dlpack__(stream=-1, **options)

    def order(self, reader: Any) -> None:
        """Let ``reader``, a stream of PyTorch, wait for the tensor, and the tensor's memory for the work there."""
        if reader != self.stream:
            reader.wait_event(self.complete)
            self.tensor.record_stream(reader)

    def copy_to_host(self) -> npt.NDArray[Any]:
        torch: Any = sys.modules["torch"]
        try:
            if self.stream is None:
                return as_array(torch, self.tensor)
            if self.computation is not None:
                calls = self.computation.calls
                return calls.to_host(self.tensor, self.dtype, self.complete, self.computation)  # type: ignore[no-any-return]
            with torch.cuda.stream(self.stream):
                return as_array(torch, self.tensor.cpu())
        except RuntimeError as error:  # a kernel that has failed since
            raise BackendError(f"PyTorch execute failure: {first_line(error)}", Code.INTERNAL) from error

    def view(self, rows: slice, shape: Sequence[int]) -> TorchTensor:
        rows_of = self.tensor[rows].view(shape)
        part = TorchTensor(rows_of, self.dtype, self.stream, self.complete, self.computation)
        part.borrowed = self.borrowed
        return part


def mark_complete(torch: Any, tensors: Iterable[Any]) -> None:
    """Record an event behind each `TorchTensor` of ``tensors``: one per device. On the thread that computes them."""
    events: dict[Any, Any] = {}
    for each in tensors:
        if isinstance(each, TorchTensor) and each.tensor.is_cuda:
            device = each.tensor.device
            if device not in events:
                stream = torch.cuda.current_stream(device)
                events[device] = stream, stream.record_event()
            each.stream, each.complete = events[device]


def as_array(torch: Any, value: Any) -> npt.NDArray[Any]:
    """Return ``value``, a tensor in the host's memory, as an array on the same memory."""
    array: npt.NDArray[Any]
    if value.dtype is torch.bfloat16:
        array = value.contiguous().view(torch.int16).numpy().view(dtypes.BF16.numpy)
    else:
        array = value.numpy()
    return array


def as_tensor(torch: Any, array: npt.NDArray[Any]) -> Any:
    """Return ``array`` as a tensor on its memory."""
    if array.dtype == dtypes.BF16.numpy:  # neither library has the other's type
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_torch(torch: Any, tensor: DeviceTensor | StackedTensors, device: str, from_array: Any) -> Any:
    """Return ``tensor`` on ``device``, for PyTorch's current stream there: a view of its memory where it can be one.

    ``from_array`` makes a tensor on ``device`` of an array."""
    if isinstance(tensor, StackedTensors):
        parts = [
            from_array(part) if isinstance(part, np.ndarray) else as_torch(torch, part, device, from_array)
            for part in tensor.parts
        ]
        return torch.cat(parts)
    if isinstance(tensor, TorchTensor):  # not by DLPack, which hides the memory from PyTorch's allocator
        if tensor.complete is not None:
            tensor.order(torch.cuda.current_stream(tensor.tensor.device))
        return tensor.tensor.to(device)
    kind, _ = tensor.__dlpack_device__()
    if kind not in (_CPU, _CUDA):
        return from_array(tensor.to_host())
    return torch.from_dlpack(tensor).to(device)
