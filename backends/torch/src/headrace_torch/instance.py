"""How an instance runs a TorchScript module: tensors on the memory of the request, and arrays on that of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, BytesTensor, Code, HeadraceError, Instance, InvalidArgument, Tensor, Tensors, dtypes
from headrace_torch.naming import check_arguments, positions
from headrace_torch.parameters import Parameters
from headrace_torch.script import Script
from headrace_torch.torch_process import first_line


class ScriptInstance(Instance):
    """Runs ``script`` on ``device``. ``inputs`` and ``outputs`` are the names that the config gives, in its order."""

    def __init__(
        self,
        torch: Any,
        script: Script,
        model: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        parameters: Parameters,
        device: str,
    ) -> None:
        self._torch, self._script, self._device, self._parameters = torch, script, device, parameters
        self._forward: Callable[..., Any] = script.module.forward
        self._outputs = dict(zip(outputs, positions(outputs, "output"), strict=True))
        self._names: Sequence[str] = inputs
        self._arguments: Mapping[str, str] = {}
        if not script.takes_dict:
            places = positions(inputs, "input", script.arguments)
            check_arguments(model, places, script.arguments, script.required)
            self._names = [inputs[places.index(place)] for place in range(len(places))]
            self._arguments = {name: script.arguments[place] for name, place in zip(inputs, places, strict=True)}
        self._is_plain = not (parameters.autocast or parameters.disable_optimized_execution) and device == "cpu"
        self._mode = torch.inference_mode(parameters.inference_mode)
        #: Whoever waits for a GPU, or starts threads of its own, does not do so on the event loop.
        self.any_thread = self._is_plain

    def execute(self, inputs: Tensors) -> Tensors:
        try:
            with self._mode:
                if self._script.takes_dict:
                    result = self._run(
                        {name: self._tensor(name, inputs[name]) for name in self._names if name in inputs}
                    )
                elif len(inputs) == len(self._names):
                    result = self._run(*[self._tensor(name, inputs[name]) for name in self._names])
                else:
                    result = self._run(
                        **{
                            self._arguments[name]: self._tensor(name, inputs[name])
                            for name in self._names
                            if name in inputs
                        }
                    )
                return self._results(result)
        except HeadraceError:
            raise
        except Exception as error:  # pybind raises classes of its own
            raise BackendError(f"PyTorch execute failure: {first_line(error)}", Code.INTERNAL) from error
        finally:
            if self._parameters.enable_cache_cleaning and self._device != "cpu":
                self._torch.cuda.empty_cache()

    def close(self) -> None:
        del self._forward, self._script

    def _run(self, *arguments: Any, **named: Any) -> Any:
        if self._is_plain:
            return self._forward(*arguments, **named)
        with ExitStack() as stack:
            torch, asked = self._torch, self._parameters
            kind = self._device.partition(":")[0]
            if kind == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            if kind == "cuda" and asked.disable_cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            if asked.autocast:
                stack.enter_context(torch.autocast(kind, getattr(torch, asked.autocast)))
            if asked.disable_optimized_execution:
                stack.enter_context(torch.jit.optimized_execution(False))
            return self._forward(*arguments, **named)

    def _tensor(self, name: str, tensor: Tensor) -> Any:
        """``tensor`` for PyTorch, in place unless the module may write to what is not to be written to."""
        if isinstance(tensor, BytesTensor):
            return _texts(name, tensor)
        array = tensor
        if not array.flags.c_contiguous or (self._script.writes and not array.flags.writeable):
            array = array.copy()
        if array.dtype == dtypes.BF16.numpy:
            value = self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        else:
            value = self._torch.from_numpy(array)
        return value if self._device == "cpu" else value.to(self._device)

    def _results(self, result: Any) -> dict[str, Tensor]:
        if isinstance(result, dict):
            missing = [name for name in self._outputs if name not in result]
            if missing:
                raise BackendError(
                    f"PyTorch execute failure: no output '{missing[0]}'; the model gives {', '.join(map(str, result))}",
                    Code.INTERNAL,
                )
            return {name: self._array(name, result[name]) for name in self._outputs}
        is_several = isinstance(result, (tuple, list)) and not (result and isinstance(result[0], str))
        given = result if is_several else (result,)
        if max(self._outputs.values()) >= len(given):
            raise BackendError(
                f"PyTorch execute failure: the configuration expects output {max(self._outputs.values())}, the model "
                f"gives {len(given)} outputs",
                Code.INTERNAL,
            )
        return {name: self._array(name, given[place]) for name, place in self._outputs.items()}

    def _array(self, name: str, value: Any) -> Tensor:
        if isinstance(value, list):
            return np.array(value, dtype=np.object_)
        if not isinstance(value, self._torch.Tensor):
            raise BackendError(
                f"output '{name}' is {type(value).__name__}, neither a tensor nor strings", Code.INTERNAL
            )
        value = value.detach().cpu()
        array: npt.NDArray[Any]
        if value.dtype is self._torch.bfloat16:
            array = value.contiguous().view(self._torch.int16).numpy().view(dtypes.BF16.numpy)
        else:
            array = value.numpy()
        return array.reshape(1) if not array.ndim else array


def _texts(name: str, tensor: BytesTensor) -> list[str]:
    """The strings of ``tensor``, whose shape is [strings], or [strings, 1] where they are rows."""
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
