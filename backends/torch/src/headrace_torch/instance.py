"""How an instance runs a TorchScript module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from headrace import BackendError, Code, HeadraceError, Instance, Tensors
from headrace_torch.conversion import TensorConverter
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
        places_of_outputs = dict(zip(outputs, positions(outputs, "output"), strict=True))
        converter = TensorConverter(torch, device, places_of_outputs, script.writes)
        self._tensor, self._results = converter.tensor, converter.results
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
