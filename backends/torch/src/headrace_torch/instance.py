"""The executions of ``forward`` of a model, for all kinds of files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace import BackendError, Code, HeadraceError, Instance, LoadError, Model, Tensor, Tensors
from headrace_torch.cuda_graphs import CudaGraphs
from headrace_torch.gpu_calls import AT_ONCE, GpuCalls
from headrace_torch.parameters import COMPILE_KEY, Parameters, parse_compile_options
from headrace_torch.pinned_memory import PinnedArrays
from headrace_torch.tensor_conversion import TensorConverter
from headrace_torch.tensor_names import check_arguments, positions
from headrace_torch.torch_process import first_line, use_one_thread
from headrace_torch.warm_up import execute_zeros
from headrace_torch.weight_sharing import needs_lock

log = logging.getLogger("headrace.pytorch")

#: Modes of ``torch.compile`` that capture CUDA graphs.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def _nothing() -> None:
    """Release nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The function of an instance: ``run``, with tensors on ``device``, one of PyTorch's names.

    - ``arguments``: forward's without ``self``, None if it takes any number. ``required``: those without a default.
      ``keywords_only``: none can be passed by position. ``takes_dict``: its only argument is a dictionary of tensors.
    - ``writes``: it may write to its inputs.
    - ``state_memory``: the addresses of its state (`headrace_torch.tensor_conversion.state_memory`).
    - ``changes``: a call may depend on an earlier one, so instances that share it lock ``lock`` during a call.
    - ``can_warm_up``: it may be called without a request, with no visible effect.
    - ``is_compiled``: it is compiled on the first call, and again for other shapes.
    - ``any_thread``: `Instance.any_thread`.
    - ``explain`` returns the text of an exception for callers.
    - ``close`` releases the model.
    """

    run: Callable[..., Any]
    device: str
    arguments: Sequence[str] | None
    required: Sequence[str] = ()
    keywords_only: bool = False
    takes_dict: bool = False
    writes: bool = True
    state_memory: frozenset[int] = frozenset()
    changes: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    can_warm_up: bool = False
    is_compiled: bool = False
    any_thread: bool = False
    explain: Callable[[BaseException], str] = first_line
    close: Callable[[], None] = _nothing


class ForwardInstance(Instance):
    """Runs ``forward``. ``inputs`` and ``outputs`` are the names in the config, in order.

    ``outputs`` may also map them to the indices of results. If ``owns``, only this instance uses ``forward``, and
    `close` closes it. On a GPU it has a CUDA ``stream``, and ``pinned`` memory for its copies. Create it on its own
    thread.
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
        pinned: PinnedArrays | None = None,
    ) -> None:
        parameters: Parameters = model.parameters
        self.model = model
        self._run: Callable[..., Any] = forward.run
        self._takes_dict, self._explain = forward.takes_dict, forward.explain
        self._close = forward.close if owns else _nothing
        if not isinstance(outputs, Mapping):
            outputs = dict(zip(outputs, positions(outputs, "output"), strict=True))
        batches = model.max_batch_size > 0
        spins = model.config.optimization.cuda.busy_wait_events
        calls = None if stream is None or pinned is None else GpuCalls(torch, stream, pinned, spins, batches)
        converter = TensorConverter(
            torch,
            forward.device,
            outputs,
            forward.writes,
            forward.state_memory,
            reuses=forward.is_compiled or model.config.optimization.cuda.graphs,
            calls=calls,
        )
        self.takes_device_tensors = converter.results_stay
        self._tensor = converter.tensor
        self._results: Callable[[Any], dict[str, Tensor]] = converter.results
        self._names: Sequence[str] = inputs
        self._arguments: Mapping[str, str] = {}
        #: A request with exactly this number of inputs can be passed by position; -1: no request.
        self._in_places = -1
        if not forward.takes_dict:
            self._name_arguments(model.name, forward, inputs)
        self._mode = torch.inference_mode(parameters.inference_mode)
        self._contexts = _contexts(torch, forward.device, parameters, stream)
        is_cleaning = parameters.enable_cache_cleaning and forward.device != "cpu"
        self._clean: Callable[[], None] = torch.cuda.empty_cache if is_cleaning else _nothing
        self._graphs: CudaGraphs | None = None
        if model.config.optimization.cuda.graphs:
            self._graphs = self._graphs_of(torch, forward, stream)
        if calls is not None:
            self._run, self._results = calls.computing(self._graphs or self._run, self._results), _identity
            self._mode = nullcontext()  # one object is not for several threads
            self._contexts[:0] = [calls.begin, partial(torch.inference_mode, parameters.inference_mode)]
            self.wait_to_take = calls.wait_to_take  # type: ignore[method-assign]
            # While a call runs, these settings apply to the whole process.
            is_global = is_cleaning or parameters.disable_cudnn or parameters.disable_optimized_execution
            if parameters.overlap and not (is_global or forward.is_compiled):
                self.concurrency = AT_ONCE
        if needs_lock(model, forward.changes):
            self._contexts.append(lambda: forward.lock)
        self._can_warm_up = forward.can_warm_up and parameters.warm_up and not model.config.model_warmup
        self._torch, self._thread = torch, threading.get_ident()
        #: False for code that waits for a GPU or starts threads: it may not run on the event loop.
        self.any_thread = forward.any_thread and not self._contexts

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
        if threading.get_ident() != self._thread and self.concurrency == 1:
            use_one_thread(self._torch)
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
        except (Exception, SystemExit) as error:  # pybind has its own classes, and a model may raise any exception
            raise BackendError(f"PyTorch execute failure: {self._explain(error)}", Code.INTERNAL) from error
        finally:
            self._clean()

    def _graphs_of(self, torch: Any, forward: Forward, stream: Any) -> CudaGraphs | None:
        """Return the graphs to capture; None on a CPU. Raises `LoadError` for a model that cannot be captured, and
        `ConfigError` for a wrong spec."""
        model, problem = self.model, ""
        if stream is None:
            log.warning("model '%s': optimization.cuda.graphs has no effect on a CPU, or with KIND_MODEL", model.name)
            return None
        if forward.changes and not model.config.runtime:
            problem = "the model changes its own state, and captures would, too"
        mode = (parse_compile_options(model.parameters.torch_compile, True) or {}).get("mode")
        if mode in _GRAPH_MODES:
            problem = f"mode '{mode}' of parameter '{COMPILE_KEY}' captures graphs itself: leave one of the two out"
        if problem:
            raise LoadError(f"model '{model.name}': optimization.cuda.graphs: {problem}")
        return CudaGraphs(torch, model, forward.run)

    def warm_up(self) -> None:
        if self._can_warm_up and self._graphs is None:
            execute_zeros(self, self.model)
        self.capture()

    def capture(self) -> None:
        """Capture CUDA graphs, if the config has them. Raises `LoadError`."""
        if self._graphs is not None:
            self._graphs.capture(self)

    def close(self) -> None:
        del self._run, self._graphs
        self._close()

    def _answer(self, inputs: Tensors) -> Tensors:
        if len(inputs) == self._in_places:
            return self._results(self._run(*[self._tensor(name, inputs[name]) for name in self._names]))
        arguments = {name: self._tensor(name, inputs[name]) for name in self._names if name in inputs}
        if self._takes_dict:
            return self._results(self._run(arguments))
        return self._results(self._run(**{self._arguments[name]: tensor for name, tensor in arguments.items()}))


def _identity(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return results


def _contexts(
    torch: Any, device: str, parameters: Parameters, stream: Any
) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts of an execution, new each time, besides the inference mode."""
    kind = device.partition(":")[0]
    found: list[Callable[[], AbstractContextManager[Any]]] = []
    if kind == "cuda":
        found.append(partial(torch.cuda.device, device))
        found.append(partial(torch.cuda.stream, stream) if stream is not None else nullcontext)
    if kind == "cuda" and parameters.disable_cudnn:
        found.append(partial(torch.backends.cudnn.flags, enabled=False))
    if parameters.autocast:
        found.append(partial(torch.autocast, kind, getattr(torch, parameters.autocast)))
    if parameters.disable_optimized_execution:
        found.append(partial(torch.jit.optimized_execution, False))
    return found
