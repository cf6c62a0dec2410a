"""The executions of ``forward`` of a model, for all kinds of files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace import BackendError, Code, HeadraceError, Instance, Model, Tensors
from headrace_torch.conversion import TensorConverter
from headrace_torch.naming import check_arguments, positions
from headrace_torch.parameters import Parameters
from headrace_torch.rehearsal import rehearse
from headrace_torch.torch_process import compute_alone, first_line
from headrace_torch.weight_sharing import takes_turns


def _nothing() -> None:
    """Nothing is to be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The function of an instance: ``run``, with tensors on ``device``, one of PyTorch's names.

    - ``arguments``: forward's without ``self``, None if it takes any number. ``required``: those without a default.
      ``keywords_only``: none can be passed by position. ``takes_dict``: its only argument is a dictionary of tensors.
    - ``writes``: it may write to its inputs. ``kept``: the memory that it may write to between calls
      (`headrace_torch.conversion.kept_memory`).
    - ``changes``: a call may depend on an earlier one, so instances that share it take ``turns``.
    - ``can_rehearse``: it may be called without a request, with no visible effect.
    - ``is_compiled``: it is compiled on the first call, and again for other shapes.
    - ``any_thread``: that of the instance. ``explain`` returns the text of an exception for callers. ``close`` releases
      the model.
    """

    run: Callable[..., Any]
    device: str
    arguments: Sequence[str] | None
    required: Sequence[str] = ()
    keywords_only: bool = False
    takes_dict: bool = False
    writes: bool = True
    kept: frozenset[int] = frozenset()
    changes: bool = True
    turns: threading.Lock = field(default_factory=threading.Lock)
    can_rehearse: bool = False
    is_compiled: bool = False
    any_thread: bool = False
    explain: Callable[[BaseException], str] = first_line
    close: Callable[[], None] = _nothing


class ForwardInstance(Instance):
    """Runs ``forward``. ``inputs`` and ``outputs`` are the names in the config, in order.

    It may be known already which results the outputs are. If ``owns``, only this instance uses ``forward``, and `close`
    closes it. ``stream`` is the CUDA stream of this instance, if it has one. Created on the thread that executes it,
    unless the event loop does.
    """

    def __init__(
        self,
        torch: Any,
        forward: Forward,
        model: Model,
        inputs: Sequence[str],
        outputs: Sequence[str] | Mapping[str, int],
        *,
        owns: bool,
        stream: Any = None,
    ) -> None:
        parameters: Parameters = model.parameters
        self.model = model
        self._run = forward.run
        self._takes_dict, self._explain = forward.takes_dict, forward.explain
        self._close = forward.close if owns else _nothing
        if not isinstance(outputs, Mapping):
            outputs = dict(zip(outputs, positions(outputs, "output"), strict=True))
        converter = TensorConverter(
            torch, forward.device, outputs, forward.writes, forward.kept, reuses=forward.is_compiled
        )
        self.takes_device_tensors = converter.leaves_on_device
        self._tensor, self._results = converter.tensor, converter.results
        self._names: Sequence[str] = inputs
        self._arguments: Mapping[str, str] = {}
        #: How many inputs a request must have for each to be given by its place; -1 if none can be.
        self._in_places = -1
        if not forward.takes_dict:
            self._name_arguments(model.name, forward, inputs)
        self._mode = torch.inference_mode(parameters.inference_mode)
        self._contexts = _contexts(torch, forward.device, parameters, stream)
        if takes_turns(model, forward.changes):
            self._contexts.append(lambda: forward.turns)
        self._can_rehearse = forward.can_rehearse and parameters.warm_up and not model.config.model_warmup
        self._torch, self._thread = torch, threading.get_ident()
        #: Code that waits for a GPU, or starts threads of its own, does not run on the event loop.
        self.any_thread = forward.any_thread and not self._contexts
        is_cleaning = parameters.enable_cache_cleaning and forward.device != "cpu"
        self._clean: Callable[[], None] = torch.cuda.empty_cache if is_cleaning else _nothing

    def _name_arguments(self, model: str, forward: Forward, inputs: Sequence[str]) -> None:
        places = positions(inputs, "input", forward.arguments)
        arguments = [f"argument {place}" for place in places] if forward.arguments is None else forward.arguments
        check_arguments(model, places, arguments, forward.required)
        by_place = sorted(zip(places, inputs, strict=True))
        self._names = [name for _, name in by_place]
        self._arguments = {name: arguments[place] for place, name in by_place}
        if not forward.keywords_only and sorted(places) == list(range(len(places))):
            self._in_places = len(places)

    def execute(self, inputs: Tensors) -> Tensors:
        if threading.get_ident() != self._thread:
            compute_alone(self._torch)
        try:
            with self._mode:
                if not self._contexts:
                    return self._answer(inputs)
                with ExitStack() as stack:
                    for make in self._contexts:
                        stack.enter_context(make())
                    return self._answer(inputs)
        except HeadraceError:
            raise
        except (Exception, SystemExit) as error:  # pybind raises classes of its own, and a model may raise anything
            raise BackendError(f"PyTorch execute failure: {self._explain(error)}", Code.INTERNAL) from error
        finally:
            self._clean()

    def warm_up(self) -> None:
        if self._can_rehearse:
            rehearse(self, self.model)

    def close(self) -> None:
        del self._run
        self._close()

    def _answer(self, inputs: Tensors) -> Tensors:
        if len(inputs) == self._in_places:
            return self._results(self._run(*[self._tensor(name, inputs[name]) for name in self._names]))
        given = {name: self._tensor(name, inputs[name]) for name in self._names if name in inputs}
        if self._takes_dict:
            return self._results(self._run(given))
        return self._results(self._run(**{self._arguments[name]: tensor for name, tensor in given.items()}))


def _contexts(
    torch: Any, device: str, asked: Parameters, stream: Any
) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts of an execution, new each time, besides the inference mode."""
    kind = device.partition(":")[0]
    found: list[Callable[[], AbstractContextManager[Any]]] = []
    if kind == "cuda":
        found.append(partial(torch.cuda.device, device))
        found.append(partial(torch.cuda.stream, stream) if stream is not None else nullcontext)
    if kind == "cuda" and asked.disable_cudnn:
        found.append(partial(torch.backends.cudnn.flags, enabled=False))
    if asked.autocast:
        found.append(partial(torch.autocast, kind, getattr(torch, asked.autocast)))
    if asked.disable_optimized_execution:
        found.append(partial(torch.jit.optimized_execution, False))
    return found
