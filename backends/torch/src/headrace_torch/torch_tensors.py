"""Tensors on GPUs: results that stay there, and tensors of other models, by DLPack and with CUDA events."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
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
    """True if results on ``device``, one of PyTorch's names, are outside of the host's memory."""
    return device != "cpu"


class TorchTensor(DeviceTensor):
    """A result of PyTorch, contiguous. ``stream`` computes it, and the CUDA event ``complete`` is recorded after it.

    Both are None on a device without streams. ``computation`` is a `headrace_torch.gpu_calls.Computation` or None.
    """

    __slots__ = ("borrowed", "complete", "computation", "stream", "tensor")

    def __init__(
        self, tensor: Any, dtype: np.dtype[Any], stream: Any = None, complete: Any = None, computation: Any = None
    ) -> None:
        super().__init__(tensor.shape, dtype)
        self.tensor, self.stream, self.complete, self.computation = tensor, stream, complete, computation
        #: A `Borrowed`: the tensors that are read to compute it.
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
            elif stream != -1:  # for -1, the reader synchronizes
                # Not `order`: the allocator would keep the stream, which its owner may destroy before the tensor.
                torch.cuda.ExternalStream(stream, device).wait_event(self.complete)
            return self.tensor.__dlpack__(stream=-1, **options)

    def order(self, reader: Any) -> None:
        """Make the stream ``reader`` wait for the tensor, and keep the tensor's memory until ``reader`` has read it."""
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
        except RuntimeError as error:  # a kernel has failed
            raise BackendError(f"PyTorch execute failure: {first_line(error)}", Code.INTERNAL) from error

    def view(self, rows: slice, shape: Sequence[int]) -> TorchTensor:
        rows_of = self.tensor[rows].view(shape)
        part = TorchTensor(rows_of, self.dtype, self.stream, self.complete, self.computation)
        part.borrowed = self.borrowed
        return part


def mark_complete(torch: Any, tensors: Iterable[Any]) -> None:
    """Record one event per device after the `TorchTensor`s of ``tensors``. Call it on the thread that computes them."""
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
    """Return ``tensor`` on ``device``, for PyTorch's current stream there; a view of its memory if possible.

    ``from_array`` copies an array to a tensor on ``device``."""
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


# ---------------------------------------------------------------------- tensors of other engines
# PyTorch releases the memory of a tensor from DLPack when nothing in Python refers to it. Kernels may be queued then,
# and the other engine would write to the memory that they read.


class Borrowed:
    """``tensors`` that kernels read until the CUDA event ``complete``.

    Results of these kernels refer to it. A reader of a result waits for the event, so the tensors may be released with
    the last result. If no result was read, another execution releases them.
    """

    __slots__ = ("complete", "tensors")

    def __init__(self, complete: Any, tensors: Iterable[DeviceTensor]) -> None:
        self.complete, self.tensors = complete, tensors

    def __del__(self) -> None:
        if not self.complete.query():
            _unread.append((self.complete, self.tensors))


_unread: deque[tuple[Any, Any]] = deque()


class Borrowing:
    """The tensors of other engines that the executions of one instance read. Any thread.

    False if `keep` has nothing to do.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, list[DeviceTensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_thread or _unread)

    def add(self, tensor: Any) -> None:
        """Record that the execution on this thread reads ``tensor``. PyTorch's own tensors and arrays are ignored."""
        for each in tensor.parts if isinstance(tensor, StackedTensors) else [tensor]:
            if isinstance(each, DeviceTensor) and not isinstance(each, TorchTensor):
                self._by_thread.setdefault(get_ident(), []).append(each)

    def keep(self, stream: Any, results: Iterable[Any]) -> None:
        """Keep the tensors added on this thread until ``stream`` has computed the ``results``."""
        while _unread and _unread[0][0].query():
            _unread.popleft()
        tensors = self._by_thread.pop(get_ident(), None)
        if tensors:
            borrowed = Borrowed(stream.record_event(), tensors)
            for each in results:
                if isinstance(each, TorchTensor):
                    each.borrowed = borrowed
