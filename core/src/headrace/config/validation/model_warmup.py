"""Rules of ``model_warmup`` (docs/spec/behaviours.md section 4.10). Data files are read by the warm-up itself."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.model_config_pb2 import ModelConfig, ModelWarmup
from headrace.config.validation.numbers import MAX_MADE_BYTES, MAX_RANK, invalid_dimension, size_in_bytes
from headrace.config.validation.problem import Problem

#: More requests than this in a sample, or more rounds, would keep the model from ever being ready.
MAX_REQUESTS = 1024
MAX_COUNT = 1_000_000
#: What Triton puts before a message about a request without an id, which a warm-up request is.
NO_ID = "[request id: <id_unknown>] "


def check(config: ModelConfig) -> Iterator[Problem]:
    """Every sample that will be run; one with batch size 0 is not."""
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size:
            yield from _check_sample(sample, f"model_warmup[{index}]", config)


def _check_sample(sample: ModelWarmup, field: str, config: ModelConfig) -> Iterator[Problem]:
    title = f"warmup sample '{sample.name}' of model {config.name}"
    most = max(config.max_batch_size, MAX_REQUESTS)
    if sample.batch_size > most:
        yield Problem(f"{field}.batch_size", f"{title} has batch_size {sample.batch_size}, the limit is {most}")
    if sample.count > MAX_COUNT:
        yield Problem(f"{field}.count", f"{title} has count {sample.count}, the limit is {MAX_COUNT}")
    for name in sorted(sample.inputs):
        yield from _check_input(name, sample.inputs[name], f"{field}.inputs[{name!r}]", title)


def _check_input(name: str, tensor: ModelWarmup.Input, field: str, title: str) -> Iterator[Problem]:
    if not tensor.data_type:
        yield Problem(f"{field}.data_type", f"{title} must specify 'data_type' for input '{name}'")
    if -1 in tensor.dims:
        yield Problem(
            f"{field}.dims", f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    elif any(dim < 0 for dim in tensor.dims):
        yield Problem(f"{field}.dims", invalid_dimension(name, tensor.dims))
    elif len(tensor.dims) > MAX_RANK:
        yield Problem(f"{field}.dims", f"tensor '{name}' has {len(tensor.dims)} dims, the limit is {MAX_RANK}")
    elif tensor.data_type and size_in_bytes(tensor.dims, tensor.data_type) > MAX_MADE_BYTES:
        yield Problem(
            f"{field}.dims",
            f"{title} takes {size_in_bytes(tensor.dims, tensor.data_type)} bytes for input '{name}', "
            f"the limit is {MAX_MADE_BYTES}",
        )
    if tensor.WhichOneof("input_data_type") is None:
        yield Problem(field, f"{NO_ID}warmup setting expects input '{name}' to have input_data_type set")
