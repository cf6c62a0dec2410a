"""CUDA graphs: captured executions, of which the GPU replays all kernels without Python.

A graph runs the same kernels on the same memory. So inputs are copied into its buffers, and results out of them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from headrace import HeadraceError, Instance, LoadError, Model, Tensors
from headrace_torch.cuda_graph_sizes import GraphSize, graph_sizes
from headrace_torch.torch_process import first_line, not_capturing
from headrace_torch.warm_up import zero_inputs

log = logging.getLogger("headrace.pytorch")

#: Executions before a capture, in which libraries choose kernels and allocate their own memory.
_WARM_UPS = 2
#: Attempts to capture: one fails if a thread of another model waits for the whole GPU meanwhile.
_TRIES = 3
#: Graphs whose capture failed, kept for the reason in `CudaGraphs._end_failed`.
_failed: list[Any] = []


class CudaGraphs:
    """Calls ``run``, which starts kernels on the current stream, or replays a graph if one was captured for the size.

    One call at a time. The next call overwrites the results.
    """

    def __init__(self, torch: Any, model: Model, run: Callable[..., Any]) -> None:
        self._torch, self._model, self._run = torch, model, run
        self._batches = model.max_batch_size > 0
        self._sizes = graph_sizes(model.config)
        self._captured: defaultdict[object, list[_CapturedRun]] = defaultdict(list)
        self._capturing: GraphSize | None = None
        #: The memory pool of all graphs. One graph runs at a time, so they share memory for temporaries.
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, instance: Instance) -> None:
        """Capture all sizes by executions of ``instance``, which calls this. Raises `LoadError`."""
        model, begin = self._model, time.monotonic()
        for size in self._sizes:
            inputs = self._zeros(size)
            self._capturing = size
            try:
                instance.execute(inputs)
            except HeadraceError as error:
                if isinstance(error, LoadError):
                    raise
                raise self._failure(size, error.message) from error
            finally:
                self._capturing = None
        for graphs in self._captured.values():
            graphs.sort(key=lambda graph: graph.size.rows)
        text = "model '%s', instance '%s': %d CUDA graphs captured in %.1f s"
        log.info(text, model.name, model.instance_name, len(self._sizes), time.monotonic() - begin)

    def _zeros(self, size: GraphSize) -> Tensors:
        config = self._model.config
        varying = any(dim < 1 for each in config.input if each.name not in size.dims for dim in each.dims)
        zeros, why = zero_inputs(config, size.rows, 0 if varying else 1)
        if why:
            raise self._failure(size, f"{why}: a graph has one shape, which a graph_spec may name")
        return {
            name: np.zeros((*array.shape[:1], *size.dims[name])[not self._batches :], array.dtype)  # type: ignore[union-attr]
            if name in size.dims
            else array
            for name, array in zeros.items()
        }

    def _failure(self, size: GraphSize, problem: str) -> LoadError:
        rows = f" of {size.rows} rows" if self._batches else ""
        return LoadError(
            f"model '{self._model.name}': optimization.cuda.graphs: an execution{rows} cannot be captured: {problem}. "
            "A model that waits for the GPU, copies from the host, or chooses operators by values has no graph: leave "
            "'graphs' out"
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        tensors = _tensors(arguments, named)
        key = _layout(tensors, named, self._batches)
        if self._capturing is not None:
            return self._capture(self._capturing, key, tensors, arguments, named)
        rows = tensors[0].shape[0] if self._batches else 0
        for graph in self._captured.get(key, ()):
            if graph.size.least <= rows <= graph.size.rows:
                return graph.replay(tensors, rows)
        return self._run(*arguments, **named)

    def _capture(self, size: GraphSize, key: object, tensors: Sequence[Any], arguments: Any, named: Any) -> Any:
        torch, run = self._torch, self._run
        stream = torch.cuda.current_stream()
        for _ in range(_WARM_UPS):
            run(*arguments, **named)
        torch.clear_autocast_cache()  # cached casts are not part of the graph, and would be freed
        stream.synchronize()
        largest = self._captured[key][0].buffers if self._captured[key] else tensors
        buffers = [whole[: len(each)] if self._batches else each for whole, each in zip(largest, tensors, strict=True)]
        for attempt in range(_TRIES):
            try:
                with not_capturing():
                    graph, results = self._record(buffers, arguments, named)
                break
            except Exception as error:  # of the model, or of CUDA because of the model or another thread
                if attempt == _TRIES - 1:
                    raise self._failure(size, first_line(error)) from error
        torch.clear_autocast_cache()
        self._captured[key].append(_CapturedRun(graph, size, buffers, results))
        graph.replay()
        return results

    def _record(self, buffers: Sequence[Any], arguments: Any, named: Any) -> tuple[Any, Any]:
        graph = self._torch.cuda.CUDAGraph()
        try:
            # "thread_local": other models may use the GPU during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            results = self._run(
                *_placed(buffers, arguments), **dict(zip(named, buffers[len(arguments) :], strict=False))
            )
            graph.capture_end()
        except BaseException:
            self._end_failed(graph, buffers[0])
            raise
        return graph, results

    def _end_failed(self, graph: Any, buffer: Any) -> None:
        """End a capture that has failed.

        ``capture_end`` of PyTorch 2.11 raises before it has ended the capture for the allocator of the GPU, the
        allocator of pinned memory, and the random numbers. This method ends the first and the last. The allocator of
        pinned memory keeps its reference to ``graph``, so ``graph`` is kept.
        """
        torch = self._torch
        _failed.append(graph)
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(buffer.device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            spare = torch.cuda.CUDAGraph()
            spare.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            buffer.zero_()
            spare.capture_end()


class _CapturedRun:
    """A captured execution: it reads ``buffers`` and writes ``results``."""

    __slots__ = ("_graph", "_results", "buffers", "size")

    def __init__(self, graph: Any, size: GraphSize, buffers: Sequence[Any], results: Any) -> None:
        self._graph, self.size, self.buffers, self._results = graph, size, buffers, results

    def replay(self, tensors: Sequence[Any], rows: int) -> Any:
        """Return the results for ``tensors``, on the current stream. ``rows`` is 0 without a batch axis."""
        is_full = rows == self.size.rows
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if is_full:
                buffer.copy_(tensor)
            else:
                buffer[:rows].copy_(tensor)
                buffer[rows:].zero_()  # these rows hold data of an earlier request
        self._graph.replay()
        return self._results if is_full else _first(self._results, rows, self.size.rows)


def _first(results: Any, rows: int, of: int) -> Any:
    """Return the first ``rows`` of each tensor of ``results`` that has ``of``."""
    if isinstance(results, dict):
        return {name: _first(each, rows, of) for name, each in results.items()}
    if isinstance(results, (tuple, list)):
        return [_first(each, rows, of) for each in results]
    return results[:rows] if getattr(results, "shape", ()) and results.shape[0] == of else results


def _tensors(arguments: Sequence[Any], named: Any) -> list[Any]:
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        return list(arguments[0].values())
    return [*arguments, *named.values()]


def _placed(buffers: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
    """Return ``buffers`` in the form of ``arguments``."""
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        return [dict(zip(arguments[0], buffers, strict=True))]
    return buffers[: len(arguments)]


def _layout(tensors: Sequence[Any], named: Any, batches: bool) -> object:
    """Return the key that tensors share with a graph: names, data types, and shapes without the rows."""
    if len(tensors) and isinstance(tensors[0], list):
        return None  # strings
    return tuple(named), tuple([(each.dtype, each.shape[batches:]) for each in tensors])
