"""Rules of ``batch_input`` and ``batch_output``, which go with ragged batches (docs/spec/behaviours.md section 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config.model_config_pb2 import TYPE_FP32, TYPE_INT32, BatchInput, BatchOutput, ModelConfig
from headrace.config.validation.problem import Problem


def check(config: ModelConfig) -> Iterator[Problem]:
    """Every batch input, then every batch output. Names count once there are inputs, or outputs, to name."""
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    suffix = f" for {config.name}"
    for index, given in enumerate(config.batch_input):
        field = f"batch_input[{index}]"
        title = f"batch input kind '{BatchInput.Kind.Name(given.kind)}'"
        yield from _check_source(given.source_input, inputs, field, title, suffix)
        if given.data_type not in (TYPE_INT32, TYPE_FP32):
            yield Problem(f"{field}.data_type", f"batch input data type must be TYPE_INT32 or TYPE_FP32{suffix}")
    for index, made in enumerate(config.batch_output):
        field = f"batch_output[{index}]"
        title = f"batch output kind '{BatchOutput.Kind.Name(made.kind)}'"
        yield from _check_source(made.source_input, inputs, field, title, suffix)
        yield from _check_targets(made.target_name, outputs, f"{field}.target_name", suffix)


def _check_source(sources: Sequence[str], inputs: set[str], field: str, title: str, suffix: str) -> Iterator[Problem]:
    field = f"{field}.source_input"
    if len(sources) != 1:
        yield Problem(field, f"{title} expects 1 source input, got {len(sources)}{suffix}")
        return
    if inputs and sources[0] not in inputs:
        yield Problem(field, f"unknown source input name '{sources[0]}'{suffix}")


def _check_targets(targets: Sequence[str], outputs: set[str], field: str, suffix: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, target in enumerate(targets):
        if outputs and target not in outputs:
            yield Problem(f"{field}[{index}]", f"unknown target output name '{target}'{suffix}")
        elif target in seen:
            yield Problem(f"{field}[{index}]", f"target output name '{target}' can only be specified once{suffix}")
        seen.add(target)
