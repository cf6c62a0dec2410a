"""Rules of ``input`` and ``output`` (docs/spec/behaviours.md sections 3.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

from headrace.config.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.config.validation.numbers import MAX_RANK, check_shape
from headrace.config.validation.problem import Problem

Tensor: TypeAlias = ModelInput | ModelOutput

_TENSORRT = "tensorrt_plan"
_RANGE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def check(config: ModelConfig) -> Iterator[Problem]:
    """Every input, then every output."""
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
    """The elements between variable dims must be as many on both sides: [2, 4, -1, 6] is [8, -1, 1, 6]."""
    ours, theirs = _segments(dims), _segments(shape)
    if len(ours) != len(theirs) and len(ours) > 1 and len(theirs) > 1:
        yield Problem(field, f"{title} has different number of variable-size dimensions for dims and reshape{suffix}")
    elif ours != theirs:
        yield Problem(field, f"{title} has different size for dims and reshape{suffix}")


def _segments(dims: Sequence[int]) -> list[int]:
    """The element counts between variable dims; [1] for no dims at all."""
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
