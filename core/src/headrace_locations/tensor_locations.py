"""Tensor locations: memory outside of the message, from which extensions read inputs and to which they write outputs.

::

    class Regions(TensorLocation):
        name = "shared_memory_region"  # the parameter of an input or an output that says so

        def source(self, parameters, tensor):
            return self.extension.memory(parameters)

Decided at start: a server without a location reads messages as if there were no such parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from headrace.errors import HeadraceError, InternalError, InvalidArgument, NotFound, plugin_failure
from headrace.frontends.extension import Addition
from headrace.messages import dtypes
from headrace.messages.device_tensor import DeviceTensor
from headrace.messages.request import InferRequest, LocatedRequest, Parameter, Undecoded
from headrace.messages.response import Answer
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes, wire_view
from headrace.messages.ticket import Ticket
from headrace.off_loop import UNBOUNDED, TooLargeForLoop
from headrace.telemetry.log_limits import rate_limited_logger

if TYPE_CHECKING:
    from headrace.engine import Engine

log = rate_limited_logger(__name__)

#: The parameter of Triton's shared memory. Messages with it are refused if no location has this name.
_REGION = "shared_memory_region"
#: Parameters of requests, inputs and outputs that the protocol gives a meaning.
_TAKEN = {
    *("binary_data", "binary_data_output", "binary_data_size", "classification", "headers", "priority", "timeout"),
    *("sequence_end", "sequence_id", "sequence_start", "shared_memory_byte_size", "shared_memory_offset"),
}

#: Up to this many bytes are copied without releasing the GIL, in 20 us.
_COPIED_AT_ONCE = 1 << 18
#: Up to this many bytes are copied on the event loop, in 0.4 ms.
_COPIED_ON_LOOP = 1 << 21

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Parameters: TypeAlias = Mapping[str, Parameter]


def no_region(name: str) -> HeadraceError:
    """Return the error for a tensor in the region ``name``: no region exists."""
    return NotFound(f"Unable to find shared memory region: '{name}'")


class TensorLocation(Addition):
    """Memory that inputs are read from and outputs are written to. One object per frontend; nothing may block.

    ``name`` is the parameter of an input or an output whose tensor is there, such as ``shared_memory_region``. Called
    on the event loop, and on a thread for large requests.
    """

    kind: ClassVar[str] = "tensor location"
    #: The name of its memory in errors.
    memory_name: ClassVar[str] = "memory"

    def source(self, parameters: Parameters, tensor: Spec) -> Buffer:
        """Return the bytes of an input: ``parameters`` are those that the request gives it, and ``tensor`` its name,
        data type and shape. They must stay as they are until the request is answered. Raise `HeadraceError` to refuse
        it, and `TooLargeForLoop` on the event loop for more than 1 ms of work: a thread calls again."""
        raise InvalidArgument(f"input '{tensor.name}' can not lie in '{self.name}'")

    def target(self, parameters: Parameters, tensor: Spec) -> memoryview:
        """Return writable memory for an output. ``tensor`` is its entry in the model's config. Called before the
        model runs. Raise `HeadraceError` to refuse it."""
        raise InvalidArgument(f"output '{tensor.name}' can not lie in '{self.name}'")

    def device_source(self, parameters: Parameters, tensor: Spec) -> DeviceTensor | None:
        """Return an input that is on a device, without a copy. None: `source` is called. Called only for models that
        take device tensors (`ModelView.takes_device_tensors`). Raise `HeadraceError` to refuse the input."""
        return None

    def device_target(self, memory: memoryview) -> Callable[[DeviceTensor], bool] | None:
        """Return a function that copies an output from a device to the place of ``memory``, which `target` returned,
        and waits for the copy. It runs on a thread, in place of `finish`, and returns False to get an array in
        ``memory`` instead. None: outputs are always arrays. Called only for models that take device tensors."""
        return None

    def finish(self, memory: Buffer, written: int) -> None:
        """Called once for what `source` returned, with the last answer; outputs that a model returns
        without a copy may still be views of it until they are sent. Called once for what `target` returned, when
        ``written`` bytes are there. Any thread. Not called for a request that is refused. Raise `HeadraceError` if
        ``memory`` was lost meanwhile: it is then the answer."""

    @classmethod
    def check(cls) -> None:
        if not cls.name.isidentifier():
            raise TypeError(f"tensor location {cls.__name__} is named {cls.name!r}, which is no name of a parameter")
        if cls.name in _TAKEN:
            raise TypeError(
                f"tensor location {cls.__name__} is named '{cls.name}', which is a parameter of the protocol"
            )
        if cls.source is TensorLocation.source and cls.target is TensorLocation.target:
            raise TypeError(f"tensor location '{cls.name}' has neither 'source' nor 'target'")


class Target:
    """The place to which one output of one request is written."""

    __slots__ = ("location", "memory")

    def __init__(self, location: TensorLocation, memory: memoryview) -> None:
        self.location, self.memory = location, memory

    def write(self, name: str, tensor: Tensor, loop_limit_bytes: int = UNBOUNDED) -> None:
        """Copy the bytes of ``tensor``, unless they are there (`LocatedRequest`). Raises `InternalError` if there is
        not enough memory, and `TooLargeForLoop` if ``loop_limit_bytes`` is set and the copy would delay the loop."""
        size = tensor.nbytes
        if size > self.memory.nbytes:
            raise InternalError(
                f"{self.location.memory_name} size specified with the request for output '{name}' "
                f"({self.memory.nbytes} bytes) should be at least {size} bytes to hold the results"
            )
        if size <= _COPIED_AT_ONCE:
            self.memory[:size] = memoryview(wire_bytes(tensor)).cast("B")
        else:  # NumPy lets other threads run meanwhile
            there, content = (np.frombuffer(each, np.uint8, size) for each in (self.memory, wire_view(tensor)))
            if there.__array_interface__["data"] != content.__array_interface__["data"]:
                if loop_limit_bytes < UNBOUNDED and size > _COPIED_ON_LOOP:
                    raise TooLargeForLoop
                np.copyto(there, content)
        _finish(self.location, self.memory, size, f"output '{name}'")


class LocatedTensors:
    """The tensors of one request that lie in locations: inputs as they are read, and the targets of outputs."""

    def __init__(self, device_inputs: Collection[str] = ()) -> None:
        #: The inputs that may be on a device: `ModelView.takes_device_tensors`.
        self.device_inputs = device_inputs
        #: The location of each input, its result, and the input's name.
        self.sources: list[tuple[TensorLocation, Buffer, str]] = []
        self.targets: dict[str, Target] = {}
        #: `Ticket.on_device` of the request.
        self.on_device: dict[str, bool] | None = None
        #: For each input and each output: the location, its parameters, and the tensor.
        self.inputs: list[tuple[TensorLocation, Parameters, Spec]] = []
        self.outputs: list[tuple[TensorLocation, Parameters, str]] = []

    def request(self, request: InferRequest) -> InferRequest:
        """Return ``request``, which was just decoded, with these tensors."""
        if not self.sources and not self.targets:
            return request
        memory = {name: target.memory for name, target in self.targets.items()}
        return LocatedRequest.of(request, memory, self.release if self.sources else None, self.on_device)

    def release(self, ticket: Ticket, answer: Answer, final: bool) -> Answer:
        """Finish the inputs with the last answer, and return it, or the error of a location. A `Watcher`."""
        if final:
            sources, self.sources = self.sources, []
            for location, memory, tensor in sources:
                try:
                    _finish(location, memory, 0, f"input '{tensor}'")
                except HeadraceError as error:
                    answer = error.with_traceback(None)  # without its frames, which hold the memory
        return answer


class TensorLocations:
    """The locations of one server by their parameters."""

    def __init__(self, locations: Iterable[TensorLocation]) -> None:
        self._locations = {location.name: location for location in locations}

    @classmethod
    def of(cls, engine: Engine) -> TensorLocations | None:
        """Return the locations of ``engine``; None if it has none."""
        locations = engine.additions(TensorLocation)
        return cls(locations) if locations else None

    def find(self, parameters: Collection[str], tensor: str) -> TensorLocation | None:
        """Return the location that one of ``parameters`` names, or None. Raises `InvalidArgument` for two."""
        used = [name for name in parameters if name in self._locations]
        if not used:
            return None
        if _REGION in parameters and _REGION not in self._locations:
            used.append(_REGION)
        if len(used) > 1:
            names = " and ".join(f"'{name}'" for name in used)
            raise InvalidArgument(f"tensor '{tensor}' can not lie in both {names}")
        return self._locations[used[0]]

    @property
    def all(self) -> Collection[TensorLocation]:
        return self._locations.values()

    @property
    def names(self) -> list[str]:
        """The names of the locations, which are parameters."""
        return list(self._locations)

    @property
    def names_beside_triton(self) -> list[str]:
        """`names`, without the one that Triton has."""
        return [name for name in self._locations if name != _REGION]

    def read_like(
        self,
        location: TensorLocation,
        parameters: Parameters,
        name: str,
        empty: Tensor | Undecoded,
        located: LocatedTensors,
    ) -> Tensor | Undecoded:
        """Return the input ``name`` from ``location``, with the data type and shape of ``empty``. An unknown data type
        is left to the model to refuse."""
        datatype = empty.datatype if isinstance(empty, Undecoded) else data_type(empty).name
        known = dtypes.BY_NAME.get(datatype)
        return (
            empty if known is None else self.read(location, parameters, Spec(name, known, tuple(empty.shape)), located)
        )

    def read(
        self, location: TensorLocation, parameters: Parameters, spec: Spec, located: LocatedTensors
    ) -> Tensor | Undecoded:
        """Return the input ``spec`` from ``location``.

        The tensor shares the memory, which is added to ``located``. A size that contradicts the shape is left to the
        model to refuse.
        """
        name, known, shape = spec.name, spec.datatype, spec.dims
        try:
            source = location.source(parameters, spec)
            content = memoryview(source).cast("B").toreadonly()
        except (HeadraceError, TooLargeForLoop):
            raise
        except BaseException as error:
            raise fault(location, f"input '{name}'", error) from None
        located.sources.append((location, source, name))
        located.inputs.append((location, parameters, spec))
        if known is dtypes.BYTES:
            return BytesTensor(content, shape)
        if prod(shape) * known.itemsize != content.nbytes:
            return Undecoded(known.name, shape, content)
        try:
            return np.frombuffer(content, known.numpy).reshape(shape)
        except ValueError:  # more axes than NumPy has
            return Undecoded(known.name, shape, content)

    def target(self, location: TensorLocation, parameters: Parameters, spec: Spec, located: LocatedTensors) -> Target:
        """Return where the output that ``spec`` describes is written, and add it to ``located``."""
        try:
            memory = memoryview(location.target(parameters, spec)).cast("B")
            if memory.readonly:
                raise TypeError("the memory is read-only")
        except HeadraceError:
            raise
        except BaseException as error:
            raise fault(location, f"output '{spec.name}'", error) from None
        located.outputs.append((location, parameters, spec.name))
        located.targets[spec.name] = target = Target(location, memory)
        return target


def _finish(location: TensorLocation, memory: Buffer, written: int, tensor: str) -> None:
    try:
        location.finish(memory, written)
    except HeadraceError:
        raise
    except BaseException as error:
        raise fault(location, tensor, error) from None


def fault(location: TensorLocation, tensor: str, error: BaseException) -> InternalError:
    """Log what ``location`` raised at ``tensor``. Return the error for the caller."""
    log.error("tensor location '%s' failed at %s", location.name, tensor, exc_info=plugin_failure(error))
    return InternalError("the request failed inside the server; its log has the reason")
