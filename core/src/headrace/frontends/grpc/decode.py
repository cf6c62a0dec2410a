"""A ``ModelInferRequest`` to an `InferRequest`, in Triton's order of checks.

Source: docs/spec/behaviours.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.errors import InvalidArgument
from headrace.frontends.grpc import contents, infer_parameters
from headrace.frontends.grpc.grpc_service_pb2 import ModelInferRequest
from headrace.frontends.grpc.wire import RawRequest
from headrace.frontends.shared_memory import no_region
from headrace.large import UNBOUNDED, Large
from headrace.messages.request import MAX_INPUTS, InferRequest, Parameter, Undecoded, log_id, too_many_inputs
from headrace.messages.tensor import Tensor


class Decoded(NamedTuple):
    """``classes`` maps outputs to the number of classes asked for. ``empty_final``: the caller
    wants the end of a decoupled request announced, even when it comes without a response."""

    request: InferRequest
    classes: Mapping[str, int]
    empty_final: bool = False


def decode(
    raw_request: RawRequest, forwarded: Mapping[str, Parameter] | None = None, patience: int = UNBOUNDED
) -> Decoded:
    """What ``raw_request`` asks for; its inputs are views on the received bytes.

    ``forwarded`` are parameters that came as metadata. Raises `InvalidArgument` with Triton's
    text, `NotFound` for a shared-memory region, and `Large` for contents that were left where they
    were, and for strings of more than ``patience`` bytes.
    """
    if raw_request.contents and patience < UNBOUNDED:
        raise Large
    message = raw_request.message
    read = infer_parameters.read(message.parameters)
    inputs = _inputs(message, raw_request, patience)
    outputs = message.outputs
    request = InferRequest(
        message.model_name,
        inputs,
        [output.name for output in outputs],
        message.id,
        message.model_version,
        {**read.custom, **forwarded} if forwarded else read.custom,
        read.priority,
        read.timeout_us,
        read.sequence_id,
        read.sequence_start,
        read.sequence_end,
    )
    return Decoded(request, _classes(outputs), read.switch)


def _inputs(message: ModelInferRequest, raw_request: RawRequest, patience: int) -> dict[str, Tensor | Undecoded]:
    raw = raw_request.raw
    inputs: dict[str, Tensor | Undecoded] = {}
    position = 0
    if len(message.inputs) > MAX_INPUTS:
        raise too_many_inputs(len(message.inputs))
    for tensor in message.inputs:
        name = tensor.name
        if name in inputs:
            raise InvalidArgument(f"{log_id(message.id)}input '{name}' already exists in request")
        if tensor.parameters:
            _refuse_shared_memory(message.model_name, tensor)
        if tensor.HasField("contents"):
            inputs[name] = _typed(message.model_name, tensor, raw_request, len(inputs))
        elif position < len(raw):
            inputs[name] = contents.from_bytes(tensor.datatype, tuple(tensor.shape), raw[position], patience)
            position += 1
        else:
            raise InvalidArgument(
                f"unable to find data for input tensor '{name}' for model '{message.model_name}' in request."
            )
    return inputs


def _typed(
    model: str, tensor: ModelInferRequest.InferInputTensor, raw_request: RawRequest, number: int
) -> Tensor | Undecoded:
    if len(raw_request.raw):
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{tensor.name}' for model "
            f"'{model}'"
        )
    spans = raw_request.contents.get(number)
    if spans is not None:
        return contents.from_spans(tensor.name, model, tensor.datatype, tuple(tensor.shape), raw_request.body, spans)
    return contents.from_contents(tensor.name, model, tensor.datatype, tuple(tensor.shape), tensor.contents)


def _refuse_shared_memory(model: str, tensor: ModelInferRequest.InferInputTensor) -> None:
    region = infer_parameters.shared_memory_region(tensor.name, tensor.parameters)
    if region is None:
        return
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
            f"'{model}'"
        )
    raise no_region(region)


def _classes(outputs: Sequence[ModelInferRequest.InferRequestedOutputTensor]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for output in outputs:
        given = output.parameters
        if not given:
            continue
        region = infer_parameters.shared_memory_region(output.name, given)
        count = infer_parameters.classes(given)
        if region is not None and count:
            raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
        if region is not None:
            raise no_region(region)
        if count:
            wanted[output.name] = count
    return wanted
