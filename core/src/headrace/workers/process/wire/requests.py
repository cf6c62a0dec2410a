"""Requests in a message::

    call u64 | caller u64 | timeout u64, us | priority u64 | rows u32 | flags u16 | inputs u16
    lengths u32[4] of the texts: id | outputs | way | settings
    texts, then inputs (`headrace.workers.process.wire.tensors`)

``call`` is the number of the request, ``caller`` that of the request in whose execution it is made,
0 for none. ``way`` is the model that is asked, its version, and the models that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias

from headrace.errors import Code, HeadraceError
from headrace.messages.request import InferRequest
from headrace.workers.process.wire import settings
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import Buffer, Frame
from headrace.workers.process.wire.names import NamesReader, NamesWriter
from headrace.workers.process.wire.tensors import TensorReader, TensorWriter

#: Makes a request of the number of its call, that of the call which asks (0 for none), and its inputs.
Make: TypeAlias = Callable[[int, int, dict[str, Any]], InferRequest]

_REQUEST = Struct("<QQQQIHHIIII")


class RequestWriter:
    """Writes requests, whose inputs ``tensors`` writes."""

    def __init__(self, tensors: TensorWriter) -> None:
        self._tensors, self._names = tensors, NamesWriter()

    def write(
        self, call: int, request: InferRequest, addressed: bool, meta: list[bytes], data: list[Buffer], size: int
    ) -> int:
        """Append ``request`` to a message with ``size`` bytes of data; returns how many it has then.

        ``addressed`` says that it is for another model, and not for the instance that runs it.
        """
        id_text = request.id.encode(errors="replace") if request.id else b""
        outputs = self._names.write(tuple(request.outputs)) if request.outputs else b""
        way = self._way(request, addressed)
        rare = settings.pack(request) if request.parameters or request.sequence_id else b""
        flags = request.sequence_start | request.sequence_end << 1 | request.decoupled << 2 | request.pinned << 3
        inputs = request.inputs
        meta.append(
            _REQUEST.pack(
                call,
                getattr(request.caller, "call", 0) if addressed else 0,
                request.timeout_us,
                request.priority,
                request.rows,
                flags,
                len(inputs),
                len(id_text),
                len(outputs),
                len(way),
                len(rare),
            )
        )
        meta += (id_text, outputs, way, rare)
        for name, tensor in inputs.items():
            size = self._tensors.write(name, tensor, meta, data, size)  # type: ignore[arg-type]  # no Undecoded here
        return size

    def _way(self, request: InferRequest, addressed: bool) -> bytes:
        """Nothing for a client's request."""
        if not (addressed or request.callers):
            return b""
        return self._names.write((request.model_name, request.model_version, *request.callers))


class RequestReader:
    """Reads requests, whose inputs ``tensors`` reads."""

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors, self._names = tensors, NamesReader()

    def read(self, message: Frame, position: int, make: Make) -> tuple[InferRequest, int]:
        """The request at ``position``, and where it ends. Raises `WireError`, and other errors at nonsense."""
        body = message.body
        call, caller, timeout, priority, rows, flags, count, *sizes = _REQUEST.unpack_from(body, position)
        id_size, outputs_size, way_size, rare_size = sizes
        position += _REQUEST.size
        texts = position + id_size + outputs_size + way_size + rare_size
        if texts > message.data:
            raise WireError(f"{message.kind.name}: texts run past the meta")
        id_text = str(body[position : position + id_size], "utf-8") if id_size else ""
        position += id_size
        outputs = self._names.read(bytes(body[position : position + outputs_size])) if outputs_size else ()
        position += outputs_size
        way = self._names.read(bytes(body[position : position + way_size])) if way_size else ()
        rare = bytes(body[texts - rare_size : texts])
        position = texts
        inputs: dict[str, Any] = {}
        for _ in range(count):
            name, tensor, position = self._tensors.read(message, position)
            inputs[name] = tensor
        request = make(call, caller, inputs)
        request.id, request.outputs, request.rows = id_text, outputs, rows
        request.timeout_us, request.priority = timeout, priority
        if flags:
            request.sequence_start, request.sequence_end = bool(flags & 1), bool(flags & 2)
            request.decoupled, request.pinned = bool(flags & 4), bool(flags & 8)
        if way:
            request.model_name, request.model_version, *callers = way
            request.callers = tuple(callers)
        if rare:
            settings.apply(rare, request)
        return request, position


def unsendable_request(error: Exception) -> HeadraceError:
    """What a model is told whose request cannot be written: a value that cannot travel is its mistake."""
    return HeadraceError(f"the request cannot be sent: {error}", Code.INVALID_ARGUMENT)
