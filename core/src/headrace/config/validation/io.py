"""Rules of ``input`` and ``output``, and of ``batch_input`` and ``batch_output`` for ragged batches.

Source: docs/spec/behaviours.md sections 3.3 and 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

from headrace.config.model_config_pb2 import (
    TYPE_FP32,
    TYPE_INT32,
    BatchInput,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelOutput,
)
from headrace.config.validation.shared import MAX_RANK, Problem, check_shape

Tensor: TypeAlias = ModelInput | ModelOutput

_TENSORRT = "tensorrt_plan"
_RANGE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def check(config: ModelConfig) -> Iterator[Problem]:
    """Check every input, then every output."""
    yield from _check_all("input", list(config.input), config)
    yield from _check_all("output", list(config.output), config)


def _check_all(direction: str, tensors: Sequence[Tensor], config: ModelConfig) -> Iterator[Problem]:
    names: set[str] = set()
    suffix = f" for {config.name}"
    for index, tensor in enumerate(tensors):
        field = f"{direction}[{index}]"
        title = f"model {direction} '{tensor.name}'"
        if not tensor.name:
            yield Problem(f"{field}.name", f"model {direction} must specify 'name'{suffix}")
        elif tensor.name in names:
            yield Problem(f"{field}.name", f"{title} is specified more than once{suffix}")
        names.add(tensor.name)
        if not tensor.data_type:
            yield Problem(f"{field}.data_type", f"{title} must specify 'data_type'{suffix}")
        yield from _check_dims(tensor, field, title, suffix)
        yield from _check_reshape(tensor, field, title, config)
        yield from _check_format(tensor, direction, field, config)


def _check_dims(tensor: Tensor, field: str, title: str, suffix: str) -> Iterator[Problem]:
    field = f"{field}.dims"
    if not tensor.dims:
        yield Problem(field, f"{title} must specify 'dims'{suffix}")
    elif not _is_in_range(tensor.dims):
        yield Problem(field, f"{title} dimension {_RANGE}{suffix}")
    else:
        yield from check_shape(field, tensor.name, tensor.dims, tensor.data_type, suffix)


def _check_reshape(tensor: Tensor, field: str, title: str, config: ModelConfig) -> Iterator[Problem]:
    if not tensor.HasField("reshape"):
        return
    field, shape, suffix = f"{field}.reshape.shape", tensor.reshape.shape, f" for {config.name}"
    if not shape and config.max_batch_size == 0:
        yield Problem(
            field,
            f"{title} cannot have empty reshape for non-batching model as scalar tensors are not supported{suffix}",
        )
    elif not _is_in_range(shape):
        yield Problem(field, f"{title} reshape dimensions {_RANGE}{suffix}")
    elif _is_in_range(tensor.dims) and len(tensor.dims) <= MAX_RANK:
        too_large = list(check_shape(field, f"{tensor.name} reshape", shape, tensor.data_type, suffix))
        yield from too_large or _compare(tensor.dims, shape, field, title, suffix)


def _compare(dims: Sequence[int], shape: Sequence[int], field: str, title: str, suffix: str) -> Iterator[Problem]:
    """Check that the element counts between variable dims are equal on both sides: [2, 4, -1, 6] fits [8, -1, 1, 6]."""
    ours, theirs = _segments(dims), _segments(shape)
    if len(ours) != len(theirs) and len(ours) > 1 and len(theirs) > 1:
        yield Problem(field, f"{title} has different number of variable-size dimensions for dims and reshape{suffix}")
    elif ours != theirs:
        yield Problem(field, f"{title} has different size for dims and reshape{suffix}")


def _segments(dims: Sequence[int]) -> list[int]:
    """Return the element counts between variable dims; [1] for no dims."""
    ends = [index for index, dim in enumerate(dims) if dim == -1]
    return [
        prod(dims[start:end]) for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(dims)], strict=True)
    ]


def _check_format(tensor: Tensor, direction: str, field: str, config: ModelConfig) -> Iterator[Problem]:
    suffix = f" for {config.name}"
    if isinstance(tensor, ModelInput) and tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        yield Problem(f"{field}.format", f"model input NHWC/NCHW require 3 dims{suffix}")
    if tensor.is_shape_tensor and config.platform != _TENSORRT:
        yield Problem(f"{field}.is_shape_tensor", f"shape tensors are only supported for TensorRT platform{suffix}")
    if not tensor.is_non_linear_format_io:
        return
    field = f"{field}.is_non_linear_format_io"
    if config.platform != _TENSORRT:
        yield Problem(field, f"Non-linear IO format is only supported for the TensorRT platform{suffix}")
    elif len(tensor.dims) != 3:
        yield Problem(field, f"Non-linear IO format {direction} requires 3 dims{suffix}")


def _is_in_range(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def check_ragged(config: ModelConfig) -> Iterator[Problem]:
    """Check every batch input, then every batch output. The inputs and outputs that they name must exist, unless the
    config has no inputs, or no outputs, yet."""
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    suffix = f" for {config.name}"
    made_inputs: set[str] = set()
    for index, batch_input in enumerate(config.batch_input):
        field = f"batch_input[{index}]"
        for place, target in enumerate(batch_input.target_name):
            if target in inputs or target in made_inputs:
                what = "is an input of the model already" if target in inputs else "can only be specified once"
                yield Problem(f"{field}.target_name[{place}]", f"target input name '{target}' {what}{suffix}")
            made_inputs.add(target)
        title = f"batch input kind '{BatchInput.Kind.Name(batch_input.kind)}'"
        yield from _check_source(batch_input.source_input, inputs, field, title, suffix)
        if batch_input.data_type not in (TYPE_INT32, TYPE_FP32):
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
