"""Starts vLLM's engine for a model: on its GPUs, with its arguments and metrics."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing.process import BaseProcess
from typing import Any, Final

from headrace import ConfigError, LoadError, Model
from headrace_vllm.engine_arguments import EngineArguments, check_known
from headrace_vllm.start_errors import collected_errors
from headrace_vllm.vllm_metrics import ServerMetrics, logger_class
from headrace_vllm.vllm_version import load_engine

#: Engines start one after the other: the GPUs of each are set in the environment of the whole process.
_STARTING = threading.Lock()
#: The priority of a request without one: after all requests that have one.
LAST: Final = (1 << 31) - 1
#: The longest time that a killed process may take to end, in seconds.
_END_S = 10.0
_GPUS = "CUDA_VISIBLE_DEVICES"


class EngineStart:
    """Creates the ``AsyncLLM`` of ``model``, also a second one after the first has died.

    ``note_cache_usage`` is called after each step with the used part of the engine's cache, from 0 to 1. Raises
    `LoadError` if vLLM is missing or of another version, and `ConfigError` for wrong arguments.
    """

    def __init__(
        self, model: Model, arguments: EngineArguments, note_cache_usage: Callable[[float], None] | None = None
    ) -> None:
        load_engine()
        from vllm.engine.arg_utils import AsyncEngineArgs

        check_known(model, arguments, [each.name for each in fields(AsyncEngineArgs)])
        self._model, self._arguments, self._gpus = model, arguments, gpus_of(model, arguments)
        self._note_cache_usage = note_cache_usage
        self._has_stats = str(arguments.members.get("disable_log_stats", False)).lower() != "true"
        labels = {"model": model.name, "version": str(model.version)}
        has_page = self._has_stats and model.parameters.report_custom_metrics and model.services is not None
        self._processes: list[BaseProcess] = []
        self._metrics = ServerMetrics(model.services, labels) if has_page and model.services else None

    def start(self) -> Any:
        """Return a new ``AsyncLLM``. In a running event loop, which it blocks.

        Raises `LoadError` with the cause if a process of the engine fails to start.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self.close()
        arguments = AsyncEngineArgs(**{**self._arguments.members, "disable_log_stats": True})
        loggers = [logger_class(self._metrics, self._note_cache_usage)] if self._has_stats else None
        with _STARTING, _visible(self._gpus), collected_errors() as errors:
            others = multiprocessing.active_children()
            try:
                # The defaults of this context are those of vLLM's own server.
                return AsyncLLM.from_engine_args(
                    arguments, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=loggers
                )
            except Exception as error:
                raise LoadError(f"vLLM does not start model '{self._model.name}': {errors.cause_of(error)}") from error
            finally:
                self._processes = [each for each in multiprocessing.active_children() if each not in others]

    def close(self) -> None:
        """Remove the metrics of the last engine, and wait for the end of its processes, which vLLM has stopped."""
        if self._metrics is not None:
            self._metrics.release()
        for process in self._processes:
            process.join(_END_S)
        self._processes = []


def gpus_of(model: Model, arguments: EngineArguments) -> tuple[int, ...]:
    """Return the GPUs of the engine; empty for all GPUs of the server.

    Raises `ConfigError` if there are fewer or more than the engine needs (Triton's rules).
    """
    if model.device.kind == "gpu":
        if arguments.world_size > 1:
            raise ConfigError(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt "
                "for multi-GPU models",
                field="instance_group",
            )
        return (model.device.id,)
    gpus: tuple[int, ...] = model.parameters.gpus
    if gpus and arguments.world_size > 1 and len(gpus) != arguments.world_size:
        raise ConfigError(
            f"GPU_DEVICE_IDS names {len(gpus)} GPUs, but tensor_parallel_size times pipeline_parallel_size is "
            f"{arguments.world_size}",
            field="parameters['GPU_DEVICE_IDS']",
        )
    return gpus


@contextmanager
def _visible(gpus: tuple[int, ...]) -> Iterator[None]:
    """Give processes that start meanwhile only ``gpus``, counted among the GPUs of this process."""
    if not gpus:
        yield
        return
    before = os.environ.get(_GPUS)
    seen = before.split(",") if before else None
    os.environ[_GPUS] = ",".join(seen[gpu] if seen and gpu < len(seen) else str(gpu) for gpu in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GPUS]
        else:
            os.environ[_GPUS] = before
