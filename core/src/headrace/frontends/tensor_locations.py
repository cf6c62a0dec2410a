"""Tensors that lie elsewhere than in the message: where extensions read inputs from, and write outputs to.

::

    class Regions(TensorLocation):
        name = "shared_memory_region"  # the parameter of an input or an output that says so

        def source(self, parameters, tensor):
            return self.extension.memory(parameters)

Whether a server has places is decided at start. One without any reads messages as if there were no such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from headrace.errors import HeadraceError, InternalError, InvalidArgument, NotFound, plugin_failure
from headrace.frontends.extension import Addition
from headrace.messages import dtypes
from headrace.messages.request import Parameter, Undecoded
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes
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
    #: What its memory is called in errors.
    memory: ClassVar[str] = "memory"

    def source(self, parameters: Parameters, tensor: Spec) -> Buffer:
        """Return the bytes of an input: ``parameters`` are those that the request gives it, and ``tensor`` its name,
        data type and shape. They must stay as they are until the request is answered. Raise `HeadraceError` to refuse
        it."""
        raise InvalidArgument(f"input '{tensor.name}' can not lie in '{self.name}'")

    def target(self, parameters: Parameters, tensor: Spec) -> memoryview:
        """Return writable memory for an output: ``tensor`` is what the model's config says of it. Called before the
        model runs. Raise `HeadraceError` to refuse it."""
        raise InvalidArgument(f"output '{tensor.name}' can not lie in '{self.name}'")

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
    """Where one output of one request is written."""

    __slots__ = ("memory", "place")

    def __init__(self, place: TensorLocation, memory: memoryview) -> None:
        self.place, self.memory = place, memory

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy the bytes of ``tensor``. Raises `InternalError` if there is not enough memory."""
        content = memoryview(wire_bytes(tensor)).cast("B")
        if content.nbytes > self.memory.nbytes:
            raise InternalError(
                f"{self.place.memory} size specified with the request for output '{name}' ({self.memory.nbytes} bytes) "
                f"should be at least {content.nbytes} bytes to hold the results"
            )
        self.memory[: content.nbytes] = content


class TensorLocations:
    """The places of one server by their parameters."""

    def __init__(self, places: Iterable[TensorLocation]) -> None:
        self._places = {place.name: place for place in places}

    @classmethod
    def of(cls, engine: Engine) -> TensorLocations | None:
        """Return the places of ``engine``; None if it has none, so that nothing is asked of them."""
        found = engine.additions(TensorLocation)
        return cls(found) if found else None

    def find(self, parameters: Collection[str], tensor: str) -> TensorLocation | None:
        """Return the place that one of ``parameters`` says; None if none does. Raises `InvalidArgument` for two."""
        found = [name for name in parameters if name in self._places]
        if not found:
            return None
        if _REGION in parameters and _REGION not in self._places:
            found.append(_REGION)
        if len(found) > 1:
            names = " and ".join(f"'{name}'" for name in found)
            raise InvalidArgument(f"tensor '{tensor}' can not lie in both {names}")
        return self._places[found[0]]

    @property
    def names(self) -> list[str]:
        """The parameters that the places own."""
        return list(self._places)

    @property
    def names_beside_triton(self) -> list[str]:
        """`names`, without the one that Triton has."""
        return [name for name in self._places if name != _REGION]

    def read(
        self, place: TensorLocation, parameters: Parameters, name: str, empty: Tensor | Undecoded
    ) -> Tensor | Undecoded:
        """Return the input ``name``, whose data type and shape are those of ``empty``, with its bytes from ``place``.

        The tensor shares the memory. An unknown data type, and a size that contradicts the shape, are left to the
        model to refuse.
        """
        datatype = empty.datatype if isinstance(empty, Undecoded) else data_type(empty).name
        known, shape = dtypes.BY_NAME.get(datatype), tuple(empty.shape)
        if known is None:
            return empty
        try:
            content = memoryview(place.source(parameters, Spec(name, known, shape))).cast("B").toreadonly()
        except HeadraceError:
            raise
        except BaseException as error:
            raise _fault(place, f"input '{name}'", error) from None
        if known is dtypes.BYTES:
            return BytesTensor(content, shape)
        if prod(shape) * known.itemsize != content.nbytes:
            return Undecoded(datatype, shape, content)
        try:
            return np.frombuffer(content, known.numpy).reshape(shape)
        except ValueError:  # more axes than NumPy has
            return Undecoded(datatype, shape, content)

    def target(self, place: TensorLocation, parameters: Parameters, spec: Spec) -> Target:
        """Return where the output that ``spec`` describes is written."""
        try:
            memory = memoryview(place.target(parameters, spec)).cast("B")
            if memory.readonly:
                raise TypeError("the memory is read-only")
        except HeadraceError:
            raise
        except BaseException as error:
            raise _fault(place, f"output '{spec.name}'", error) from None
        return Target(place, memory)


def _fault(place: TensorLocation, tensor: str, error: BaseException) -> InternalError:
    """Log what ``place`` raised at ``tensor``. Return the error for the caller."""
    log.error("tensor location '%s' failed at %s", place.name, tensor, exc_info=plugin_failure(error))
    return InternalError("the request failed inside the server; its log has the reason")
