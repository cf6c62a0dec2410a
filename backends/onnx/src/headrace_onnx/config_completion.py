"""What an ONNX graph can fill into a config (docs/spec/behaviours.md sections 10.1 and 10.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain

from headrace import ConfigError, ModelConfig, ModelInput, ModelOutput
from headrace_onnx.graph import Graph, TensorInfo

log = logging.getLogger("headrace.onnxruntime")


def is_complete(config: ModelConfig) -> bool:
    """Whether the config already names inputs and outputs; then nothing at all is completed, so
    that ``max_batch_size: 0`` can be said."""
    return bool(config.input or config.batch_input) and bool(config.output)


def complete(config: ModelConfig, graph: Graph, default_max_batch_size: int) -> None:
    """Fill ``max_batch_size``, ``dynamic_batching``, ``input`` and ``output`` of ``config``.

    Raises `ConfigError` when the config asks for batches that the graph does not take, and
    `LoadError` for a tensor that the protocol cannot carry.
    """
    _complete_batching(config, graph, default_max_batch_size)
    skipped = 1 if config.max_batch_size > 0 else 0
    if not config.input and not config.batch_input:
        for info in graph.inputs.values():
            _describe(config.input.add(), info, "input", config.name, skipped)
    if not config.output:
        for info in graph.outputs.values():
            _describe(config.output.add(), info, "output", config.name, skipped)


def _complete_batching(config: ModelConfig, graph: Graph, default_max_batch_size: int) -> None:
    infos = [*graph.inputs.values(), *graph.outputs.values()]
    if not all(info.batches for info in infos) or not _hints_agree(config, graph):
        if config.max_batch_size > 0:
            raise ConfigError(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        return
    if config.max_batch_size == 0:
        config.max_batch_size = default_max_batch_size
        log.info("model '%s': max_batch_size completed to %d", config.name, default_max_batch_size)
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _hints_agree(config: ModelConfig, graph: Graph) -> bool:
    """Whether the dims that the config does give leave the batch axis out."""
    given: Iterable[ModelInput | ModelOutput] = chain(config.input, config.output)
    known = graph.inputs | graph.outputs
    return all(len(io.dims) + 1 == len(known[io.name].shape) for io in given if io.name in known)


def _describe(io: ModelInput | ModelOutput, info: TensorInfo, direction: str, model: str, skipped: int) -> None:
    io.name = info.name
    io.data_type = info.require_datatype(direction, model).config_value  # type: ignore[assignment]
    io.dims.extend(info.shape[skipped:])
    if not io.dims:
        io.dims.append(1)
        if skipped:
            io.reshape.SetInParent()
