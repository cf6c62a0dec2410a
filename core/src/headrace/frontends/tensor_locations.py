"""Tensor locations: memory outside of the message, from which extensions read inputs and to which they write outputs.

::

    class Regions(TensorLocation):
        name = "shared_memory_region"  # the parameter of an input or an output that says so

        def source(self, parameters, tensor):
            return self.extension.memory(parameters)

Decided at start: a server without a location reads messages as if there were no such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from headrace.errors import HeadraceError, InternalError, InvalidArgument, NotFound, plugin_failure
from headrace.frontends.extension import Addition
from headrace.messages import dtypes
from headrace.messages.request import Parameter, Undecoded
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes
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

#: How an output is sent.
W = TypeVar("W")
Buffer: TypeAlias = "bytes | bytearray | memoryview"
Parameters: TypeAlias = Mapping[str, Parameter]


def no_region(name: str) -> HeadraceError:
    """Return the error for a tensor in the region ``name``: no region exists."""
    return NotFound(f"Unable to find shared memory region: '{name}'")


class TensorLocation(Addition):
    """Memory that inputs are read from and outputs are written to. One object per frontend; nothing may block.

    ``name`` is the parameter of an input or an output which says that the tensor lies there, such as
    ``shared_memory_region``. Called on the event loop, and on a thread for large requests.
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
        """Return writable memory for an output: ``tensor`` is what the model's config says of it. Called before the
        model runs. Raise `HeadraceError` to refuse it."""
        raise InvalidArgument(f"output '{tensor.name}' can not lie in '{self.name}'")

    def finish(self, memory: Buffer, written: int) -> None:
        """Called when the model has read what `source` returned, or when ``written`` bytes were copied to what `target`
        returned. Any thread, perhaps more than once. Raise `HeadraceError` if ``memory`` was lost meanwhile."""

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


#: Where an input lies: the location, what it returned, and the name of the input.
Source: TypeAlias = "tuple[TensorLocation, Buffer, str]"


class Target:
    """Where one output of one request is written."""

    __slots__ = ("location", "memory")

    def __init__(self, location: TensorLocation, memory: memoryview) -> None:
        self.location, self.memory = location, memory

    def write(self, name: str, tensor: Tensor, loop_limit_bytes: int = UNBOUNDED) -> None:
        """Copy the bytes of ``tensor``. Raises `InternalError` if there is not enough memory, and `TooLargeForLoop` if
        ``loop_limit_bytes`` is set and the copy would delay the event loop."""
        if loop_limit_bytes < UNBOUNDED and tensor.nbytes > _COPIED_ON_LOOP:
            raise TooLargeForLoop
        content = memoryview(wire_bytes(tensor)).cast("B")
        size = content.nbytes
        if size > self.memory.nbytes:
            raise InternalError(
                f"{self.location.memory_name} size specified with the request for output '{name}' "
                f"({self.memory.nbytes} bytes) should be at least {size} bytes to hold the results"
            )
        if size > _COPIED_AT_ONCE:  # NumPy lets other threads run meanwhile
            np.copyto(np.frombuffer(self.memory, np.uint8, size), np.frombuffer(content, np.uint8))
        else:
            self.memory[:size] = content
        _finish(self.location, self.memory, size, f"output '{name}'")


class LocatedInputs(dict[str, W]):
    """How the outputs of one request are sent, by their names, if its inputs lie in locations.

    A look-up, which follows the model's run, first checks that these inputs were there until then.
    """

    def __init__(self, ways: Mapping[str, W], sources: Sequence[Source]) -> None:
        super().__init__(ways)
        self._sources = sources

    def __bool__(self) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        for location, memory, tensor in self._sources:
            _finish(location, memory, 0, f"input '{tensor}'")
        return super().get(name, default)


class TensorLocations:
    """The locations of one server by their parameters."""

    def __init__(self, locations: Iterable[TensorLocation]) -> None:
        self._locations = {location.name: location for location in locations}

    @classmethod
    def of(cls, engine: Engine) -> TensorLocations | None:
        """Return the locations of ``engine``; None if it has none."""
        found = engine.additions(TensorLocation)
        return cls(found) if found else None

    def find(self, parameters: Collection[str], tensor: str) -> TensorLocation | None:
        """Return the location that one of ``parameters`` names, or None. Raises `InvalidArgument` for two."""
        found = [name for name in parameters if name in self._locations]
        if not found:
            return None
        if _REGION in parameters and _REGION not in self._locations:
            found.append(_REGION)
        if len(found) > 1:
            names = " and ".join(f"'{name}'" for name in found)
            raise InvalidArgument(f"tensor '{tensor}' can not lie in both {names}")
        return self._locations[found[0]]

    @property
    def names(self) -> list[str]:
        """The names of the locations, which are parameters."""
        return list(self._locations)

    @property
    def names_beside_triton(self) -> list[str]:
        """`names`, without the one that Triton has."""
        return [name for name in self._locations if name != _REGION]

    def read(
        self,
        location: TensorLocation,
        parameters: Parameters,
        name: str,
        empty: Tensor | Undecoded,
        sources: list[Source],
    ) -> Tensor | Undecoded:
        """Return the input ``name`` from ``location``, with the data type and shape of ``empty``.

        The tensor shares the memory, which is added to ``sources`` for `LocatedInputs`. An unknown data type, and a
        size that contradicts the shape, are left to the model to refuse.
        """
        datatype = empty.datatype if isinstance(empty, Undecoded) else data_type(empty).name
        known, shape = dtypes.BY_NAME.get(datatype), tuple(empty.shape)
        if known is None:
            return empty
        try:
            source = location.source(parameters, Spec(name, known, shape))
            content = memoryview(source).cast("B").toreadonly()
        except (HeadraceError, TooLargeForLoop):
            raise
        except BaseException as error:
            raise _fault(location, f"input '{name}'", error) from None
        sources.append((location, source, name))
        if known is dtypes.BYTES:
            return BytesTensor(content, shape)
        if prod(shape) * known.itemsize != content.nbytes:
            return Undecoded(datatype, shape, content)
        try:
            return np.frombuffer(content, known.numpy).reshape(shape)
        except ValueError:  # more axes than NumPy has
            return Undecoded(datatype, shape, content)

    def target(self, location: TensorLocation, parameters: Parameters, spec: Spec) -> Target:
        """Return where the output that ``spec`` describes is written."""
        try:
            memory = memoryview(location.target(parameters, spec)).cast("B")
            if memory.readonly:
                raise TypeError("the memory is read-only")
        except HeadraceError:
            raise
        except BaseException as error:
            raise _fault(location, f"output '{spec.name}'", error) from None
        return Target(location, memory)


def _finish(location: TensorLocation, memory: Buffer, written: int, tensor: str) -> None:
    try:
        location.finish(memory, written)
    except HeadraceError:
        raise
    except BaseException as error:
        raise _fault(location, tensor, error) from None


def _fault(location: TensorLocation, tensor: str, error: BaseException) -> InternalError:
    """Log what ``location`` raised at ``tensor``. Return the error for the caller."""
    log.error("tensor location '%s' failed at %s", location.name, tensor, exc_info=plugin_failure(error))
    return InternalError("the request failed inside the server; its log has the reason")
