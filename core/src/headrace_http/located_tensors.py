"""Infer requests whose inputs or outputs lie elsewhere than in the message (`TensorLocation`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument
from headrace.messages.request import InferRequest, Parameter, Undecoded
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import ticket_of
from headrace_hosts.cleared_cache import ClearedCache
from headrace_http.documents import as_array, as_boolean, as_string, as_unsigned
from headrace_http.infer_request import custom_parameter, cut_id, decode, header_length, may_name_an_id
from headrace_http.inference import Answer, InferenceHandler
from headrace_http.inputs import not_one_source, read_inputs
from headrace_http.message import HEADER_LENGTH, HttpRequest
from headrace_http.outputs import BINARY, JSON, LocatedOutput, OutputFormat, read_outputs
from headrace_http.request_body import decompress
from headrace_locations.device_locations import on_device
from headrace_locations.located_plans import PLANNED_BYTES, PLANS, LocatedPlan
from headrace_locations.tensor_locations import LocatedTensors, Parameters, Target, TensorLocation, TensorLocations

if TYPE_CHECKING:
    from headrace.engine import Engine, ModelView

#: Triton's readers of the parameters for a tensor in shared memory.
_TYPES: dict[str, Callable[[Any, str], Parameter]] = {
    "shared_memory_region": as_string,
    "shared_memory_offset": as_unsigned,
    "shared_memory_byte_size": as_unsigned,
}


class LocatedInferenceHandler(InferenceHandler):
    """The handler of infer requests on a server with ``locations``."""

    def __init__(self, engine: Engine, locations: TensorLocations) -> None:
        super().__init__(engine)
        self._ticket = ticket_of
        self._locations, self._on_device = locations, on_device(locations)
        self._names = [name.encode() for name in locations.names]
        self._plans = ClearedCache[bytes, LocatedPlan](PLANS)

    def _read(self, http: HttpRequest, name: str, version: str, answer: Answer, loop_limit_bytes: int) -> InferRequest:
        headers, body = http.headers, http.body
        if headers.get(b"content-encoding") in (b"gzip", b"deflate"):
            body = decompress(body, self._max_bytes, loop_limit_bytes, self._take)
        length = headers.get(HEADER_LENGTH)
        json_bytes = body.nbytes if length is None else header_length(length, body.nbytes)
        if 0 < json_bytes <= min(loop_limit_bytes, self._max_bytes):
            front = body[:json_bytes].tobytes()
            if any(word in front for word in self._names):
                device_inputs = answer.view.takes_device_tensors
                locations = self._locations if device_inputs is None else self._on_device
                is_short = json_bytes == body.nbytes <= PLANNED_BYTES
                request_id, rest = cut_id(front) if is_short else ("", b"")
                planned = self._plans.get(rest)
                if planned is not None and (
                    found := self._planned(planned, locations, answer, name, version, request_id)
                ):
                    return found
                located = LocatedTensors(device_inputs or ())
                decoded = decode(
                    name,
                    version,
                    body,
                    json_bytes,
                    self._max_bytes,
                    loop_limit_bytes,
                    partial(_read_inputs, locations, located),
                    partial(_read_outputs, locations, located, answer.view),
                )
                request, answer.formats, answer.default = decoded
                if is_short and request.id == request_id and not (request_id and may_name_an_id(rest)):
                    plan = LocatedPlan.of(request, located, answer.default is BINARY)
                    if plan is not None:
                        self._plans.keep(rest, plan)
                return located.request(request)
        return super()._read(http, name, version, answer, loop_limit_bytes)

    def _planned(
        self, plan: LocatedPlan, locations: TensorLocations, answer: Answer, name: str, version: str, request_id: str
    ) -> InferRequest | None:
        """Return the request of ``plan``, and set the formats of its ``answer``."""
        found = plan.request(locations, answer.view, name, version, request_id)
        if found is None:
            return None
        request, located = found
        answer.formats = {output: _located(target) for output, target in located.targets.items()}
        answer.default = BINARY if plan.flag else JSON
        return request


def inference_handler(engine: Engine) -> InferenceHandler:
    """Return the handler of infer requests for the extensions that ``engine`` has."""
    locations = TensorLocations.of(engine)
    return InferenceHandler(engine) if locations is None else LocatedInferenceHandler(engine, locations)


def _read_inputs(
    locations: TensorLocations,
    tensors: LocatedTensors,
    entries: Any,
    model: str,
    request_id: str,
    body: memoryview,
    position: int,
    max_bytes: int,
    loop_limit_bytes: int,
) -> dict[str, Tensor | Undecoded]:
    """Do as `read_inputs`, if some tensors may lie in ``locations``. Adds these to ``tensors``."""
    entries, located = list(as_array(entries, "inputs")), {}
    for number, entry in enumerate(entries):
        found = _location_of(locations, entry, "data")
        if found is not None:
            located[number] = found
            # Read without its bytes, for its name, type and shape.
            entries[number] = {**entry, "parameters": {"binary_data_size": 0}}
    inputs = read_inputs(entries, model, request_id, body, position, max_bytes, loop_limit_bytes)
    for number, name in enumerate(list(inputs)):
        if number in located:
            inputs[name] = locations.read_like(*located[number], name, inputs[name], tensors)
    return inputs


def _read_outputs(
    locations: TensorLocations, tensors: LocatedTensors, view: ModelView, entries: Any
) -> tuple[list[str], Mapping[str, OutputFormat]]:
    """`read_outputs`, if the model that ``view`` describes may write some of them to ``locations``.

    Adds these to ``tensors``.
    """
    names: list[str] = []
    formats: dict[str, OutputFormat] = {}
    for entry in as_array(entries, "outputs"):
        found = _location_of(locations, entry)
        spec = view.outputs.get(str(entry.get("name"))) if found is not None else None
        if found is None or spec is None:  # the model refuses an output that it does not have
            more, its_formats = read_outputs([entry if found is None else {**entry, "parameters": {}}])
            names += more
            formats |= its_formats
            continue
        location, parameters = found
        for other in ("classification", "binary_data"):
            given = entry["parameters"].get(other)
            if given is not None and (other == "classification" or as_boolean(given, other)):
                raise InvalidArgument(f"Output can't set both '{location.name}' and '{other}'")
        names.append(spec.name)
        formats[spec.name] = _located(locations.target(location, parameters, spec, tensors))
    return names, formats


def _located(target: Target) -> LocatedOutput:
    found = LocatedOutput(False, -1)
    found.target = target
    return found


def _location_of(locations: TensorLocations, entry: Any, *sources: str) -> tuple[TensorLocation, Parameters] | None:
    """Return the location that the parameters of ``entry`` name, and these; None if they name none.

    Raises `InvalidArgument` if it has one of ``sources`` as well.
    """
    given = entry.get("parameters") if type(entry) is dict else None
    if type(given) is not dict or (location := locations.find(given, str(entry.get("name")))) is None:
        return None
    if sources:
        others = [name for name in sources if name in entry] + ["binary_data_size"] * ("binary_data_size" in given)
        if others:
            raise not_one_source([*others, location.name], locations.names_beside_triton)
    return location, {name: _TYPES.get(name, custom_parameter)(value, name) for name, value in given.items()}
