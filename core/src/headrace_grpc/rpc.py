"""One RPC, as handlers and transports see it: what a handler may ask, what it answers, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import Message

from headrace.engine import AnyOperation
from headrace.errors import HeadraceError

#: Keys are in lower case and may repeat; values of keys that end in ``-bin`` are bytes.
Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

#: Sends one message of a stream; waits while the client does not read.
Send: TypeAlias = Callable[[bytes], Awaitable[None]]
#: Answers a call, once, on the event loop: a serialized message, or why there is none.
Reply: TypeAlias = Callable[["bytes | HeadraceError"], None]
#: Says that the caller has gone. Called at most once.
Cancel: TypeAlias = Callable[[], object]


class Context(Protocol):
    """One call. When the caller goes away or its deadline passes, the transport cancels the task
    that runs the handler, or calls what the handler returned."""

    @property
    def metadata(self) -> Metadata:
        """What the caller sent with the call."""

    @property
    def deadline_ns(self) -> int:
        """When nobody wants an answer any more, in monotonic nanoseconds; 0 for never."""

    @property
    def peer(self) -> str:
        """The address of the other end; empty where that is not known."""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """What the other end proved itself with, as ``ssl.SSLSocket.getpeercert`` has it; None without."""

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop and takes no new requests."""

    @property
    def streams(self) -> int:
        """How many calls with any number of messages are open on its connection; 1 where that is not known."""


#: What handlers answer: a message, or one that is serialized already.
Answer: TypeAlias = "Message | bytes"
Unary: TypeAlias = Callable[[Any, Context], Awaitable[Answer]]
Stream: TypeAlias = Callable[[AsyncIterator[Any], Send, Context], Awaitable[None]]
_Replied: TypeAlias = "asyncio.Future[bytes | HeadraceError]"
Direct: TypeAlias = Callable[[Any, Context, Reply], "Cancel | None"]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC. ``parse`` makes the handler's request of what was received.

    Exactly one of three is set: ``unary`` and ``stream`` run in a task of their own. ``direct``
    answers by callback, now or later; it raises `HeadraceError` if it refuses now, and returns what
    cancels it.
    """

    service: str
    name: str
    #: What interceptors admit before the message is parsed.
    operation: AnyOperation
    #: Of bytes or a memoryview. Raises `TooLargeForLoop` for what is to be read by ``parse_large``, on a thread.
    parse: Callable[[Any], Any]
    unary: Unary | None = None
    stream: Stream | None = None
    direct: Direct | None = None
    parse_large: Callable[[Any], Any] | None = None
    #: The number and the name of the field of its message that names a model; None if it has none.
    model_field: tuple[int, str] | None = None


def awaited(handler: Direct) -> Unary:
    """``handler`` for a task that waits for its answer."""

    async def call(request: Any, context: Context) -> bytes:
        # An error is a result, too: as an exception it would be logged when the caller has gone.
        future: _Replied = asyncio.get_running_loop().create_future()
        cancel = handler(request, context, partial(_settle, future))
        try:
            answer = await future
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise
        if isinstance(answer, HeadraceError):
            try:
                raise answer
            finally:
                del answer, future  # they would keep each other
        return answer

    return call


def _settle(future: _Replied, answer: bytes | HeadraceError) -> None:
    if not future.done():  # done: the caller has gone
        future.set_result(answer)


def serialize(answer: Answer) -> bytes:
    """What goes on the wire for a handler's ``answer``."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def first(metadata: Metadata, key: str) -> str | None:
    """The first text under ``key``, or None."""
    for name, value in metadata:
        if name == key and isinstance(value, str):
            return value
    return None


def texts(metadata: Metadata) -> list[tuple[str, str]]:
    """The entries that are text."""
    return [(name, value) for name, value in metadata if isinstance(value, str)]
