"""Messages whose inputs or outputs lie elsewhere than in the message (`TensorLocation`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument
from headrace.frontends.tensor_locations import LocatedTensors, Parameters, Target, TensorLocation, TensorLocations
from headrace.off_loop import LARGE_BYTES, UNBOUNDED
from headrace_grpc import infer_parameters, usual_messages
from headrace_grpc.decode import Decoded, decode
from headrace_grpc.grpc_service_pb2 import InferParameter, ModelInferRequest
from headrace_grpc.usual_messages import ReadMessage, UsualMessage
from headrace_grpc.wire import RawRequest

if TYPE_CHECKING:
    from headrace.engine import ModelView
    from headrace.messages.request import InferRequest


class LocatedMessages:
    """Reads messages on a server with ``locations``. ``resolve`` finds the model that a message names."""

    def __init__(self, locations: TensorLocations, resolve: Callable[[str, str], ModelView]) -> None:
        self._locations, self._resolve = locations, resolve

    def decode(self, message: ReadMessage) -> Decoded:
        """`usual_messages.decode`. A usual message has no tensor with such a parameter."""
        if isinstance(message, UsualMessage):
            return usual_messages.decode(message)
        return self._decode(message, LARGE_BYTES)

    def decode_large(self, raw_request: RawRequest) -> Decoded:
        """`decode` of what raised `TooLargeForLoop`, on a thread."""
        return self._decode(raw_request, UNBOUNDED)

    def _decode(self, raw_request: RawRequest, loop_limit_bytes: int) -> Decoded:
        message = raw_request.message
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
        tensors = LocatedTensors()
        self._read(read.request, inputs, tensors)
        tensors.targets = self._targets(message, outputs)
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

    def _read(
        self,
        request: InferRequest,
        located: Mapping[int, tuple[TensorLocation, Parameters]],
        tensors: LocatedTensors,
    ) -> None:
        inputs: Any = request.inputs  # just created, and not shared
        for number, name in enumerate(list(inputs)):
            if number in located:
                inputs[name] = self._locations.read(*located[number], name, inputs[name], tensors)

    def _targets(self, message: Any, located: Mapping[str, tuple[TensorLocation, Parameters]]) -> dict[str, Target]:
        targets: dict[str, Target] = {}
        if located:
            known = self._resolve(message.model_name, message.model_version).outputs
            for name, (location, parameters) in located.items():
                if name in known:  # the model refuses another one
                    targets[name] = self._locations.target(location, parameters, known[name])
        return targets

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
