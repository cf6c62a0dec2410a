"""Messages whose inputs or outputs lie elsewhere than in the message (`TensorLocation`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument
from headrace.off_loop import LARGE_BYTES, UNBOUNDED
from headrace_grpc import infer_parameters, usual_messages
from headrace_grpc.decode import Decoded, decode
from headrace_grpc.grpc_service_pb2 import InferParameter, ModelInferRequest
from headrace_grpc.usual_messages import ReadMessage, UsualMessage
from headrace_grpc.wire import LENGTH_DELIMITED, RawRequest, varint
from headrace_hosts.cleared_cache import ClearedCache
from headrace_locations.device_locations import on_device
from headrace_locations.located_plans import PLANNED_BYTES, PLANS, LocatedPlan
from headrace_locations.tensor_locations import LocatedTensors, Parameters, TensorLocation, TensorLocations

if TYPE_CHECKING:
    from headrace.engine import ModelView
    from headrace.messages.request import InferRequest


#: The tag of the id of a message.
_ID = 3 << 3 | LENGTH_DELIMITED


class LocatedMessages:
    """Reads messages on a server with ``locations``. ``resolve`` finds the model that a message names."""

    def __init__(self, locations: TensorLocations, resolve: Callable[[str, str], ModelView]) -> None:
        self._locations, self._on_device, self._resolve = locations, on_device(locations), resolve
        self._plans = ClearedCache[bytes, LocatedPlan](PLANS)

    def decode(self, message: ReadMessage) -> Decoded:
        """`usual_messages.decode`. A usual message has no tensor with such a parameter."""
        if isinstance(message, UsualMessage):
            return usual_messages.decode(message)
        return self._decode(message, LARGE_BYTES)

    def decode_large(self, raw_request: RawRequest) -> Decoded:
        """`decode` of what raised `TooLargeForLoop`, on a thread."""
        return self._decode(raw_request, UNBOUNDED)

    def _decode(self, raw_request: RawRequest, loop_limit_bytes: int) -> Decoded:
        message, key = raw_request.message, _without_id(raw_request)
        if (known := self._plans.get(key)) is not None:
            view = self._resolve(message.model_name, message.model_version)
            locations = self._locations if view.takes_device_tensors is None else self._on_device
            planned = known.request(locations, view, message.model_name, message.model_version, message.id)
            if planned is not None:
                request, tensors = planned
                return Decoded(request, tensors.targets, known.flag)
        inputs = {number: found for number, tensor in enumerate(message.inputs) if (found := self._location_of(tensor))}
        outputs = {output.name: found for output in message.outputs if (found := self._location_of(output))}
        if not inputs and not outputs:
            return decode(raw_request, None, loop_limit_bytes)
        # A copy, because a thread reads the message again if this raises `TooLargeForLoop`.
        message = ModelInferRequest()
        message.CopyFrom(raw_request.message)
        raw_request = raw_request._replace(message=message)
        raw = self._without_located(raw_request, inputs)
        for output in message.outputs:
            if output.name in outputs:
                self._refuse_classes(output, outputs[output.name][0])
        read = decode(raw, None, loop_limit_bytes)
        view = self._resolve(message.model_name, message.model_version)
        locations = self._locations if view.takes_device_tensors is None else self._on_device
        tensors = LocatedTensors(view.takes_device_tensors or ())
        _read(read.request, inputs, tensors, locations)
        for name, each in outputs.items():
            if name in view.outputs:  # the model refuses another one
                locations.target(*each, view.outputs[name], tensors)
        if key and (plan := LocatedPlan.of(read.request, tensors, read.empty_final)) is not None:
            self._plans.keep(key, plan)
        return read._replace(request=tensors.request(read.request), classes={**read.classes, **tensors.targets})

    def _without_located(
        self, raw_request: RawRequest, located: Mapping[int, tuple[TensorLocation, Parameters]]
    ) -> RawRequest:
        """Return the message with empty bytes for each input in ``located``."""
        message, raw, position = raw_request.message, list(raw_request.raw), 0
        for number, tensor in enumerate(message.inputs):
            if number not in located:
                position += not tensor.HasField("contents")
                continue
            if tensor.HasField("contents"):
                raise InvalidArgument(
                    f"unexpected 'content' provided when using {located[number][0].memory_name} for input tensor "
                    f"'{tensor.name}' for model '{message.model_name}'"
                )
            tensor.ClearField("parameters")
            if raw_request.raw:
                raw.insert(position, b"")
                position += 1
            else:
                tensor.contents.SetInParent()
        return raw_request._replace(raw=raw)

    def _location_of(self, tensor: Any) -> tuple[TensorLocation, Parameters] | None:
        """Return the location that the parameters of an input or an output name, and these; None if they name none."""
        given: Mapping[str, InferParameter] = tensor.parameters
        location = self._locations.find(given, tensor.name) if given else None
        if location is None:
            return None
        infer_parameters.shared_memory_region(tensor.name, given)
        return location, {name: infer_parameters.custom(value, name) for name, value in given.items()}

    def _refuse_classes(self, output: Any, location: TensorLocation) -> None:
        if infer_parameters.classes(output.parameters):
            raise InvalidArgument(f"output can't set both '{location.name}' and 'classification'")
        output.ClearField("parameters")


def _read(
    request: InferRequest,
    located: Mapping[int, tuple[TensorLocation, Parameters]],
    tensors: LocatedTensors,
    locations: TensorLocations,
) -> None:
    inputs: Any = request.inputs  # just created, and not shared
    for number, name in enumerate(list(inputs)):
        if number in located:
            inputs[name] = locations.read_like(*located[number], name, inputs[name], tensors)


def _without_id(raw_request: RawRequest) -> bytes:
    """Return the bytes of a short message without its id. Empty if the message is long, or the id is not found once."""
    if len(raw_request.body) > PLANNED_BYTES:
        return b""
    body, request_id = bytes(raw_request.body), raw_request.message.id.encode()
    if not request_id:
        return body
    field = bytes((_ID,)) + varint(len(request_id)) + request_id
    return body.replace(field, b"") if body.count(field) == 1 else b""
