"""One RPC: the interface between handlers and transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import Message

from headrace.engine import AnyOperation, Caller
from headrace.errors import HeadraceError
from headrace.frontends.failures import log_fault

#: Keys are in lower case and may repeat; values of keys that end in ``-bin`` are bytes.
Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

#: Sends one message of a stream. Waits while the client does not read.
Send: TypeAlias = Callable[[bytes], Awaitable[None]]
#: Answers a call, once, on the event loop: with a serialized message, or with an error.
Reply: TypeAlias = Callable[["bytes | HeadraceError"], None]
#: Cancels the work of a handler, because the caller has disconnected. Called at most once.
Cancel: TypeAlias = Callable[[], object]


class Context(Protocol):
    """One call. When the caller disconnects or the deadline passes, the transport cancels the handler.

    It cancels the handler's task, or calls the function that the handler returned.
    """

    @property
    def metadata(self) -> Metadata:
        """The metadata of the caller."""

    def only(self, name: bytes) -> str | None:
        """Return the text under ``name``. None if there is none; empty if there are several, or bytes."""

    @property
    def deadline_ns(self) -> int:
        """The deadline in monotonic ns; 0 for none."""

    @property
    def peer(self) -> str:
        """The address of the other end; empty if unknown."""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The certificate of the other end, as from ``ssl.SSLSocket.getpeercert``; None without one."""

    @property
    def has_left(self) -> bool:
        """True if the transport has cancelled the handler, whose `CancelledError` is then not its own."""

    @property
    def draining(self) -> bool:
        """True if the server is about to stop and takes no new requests."""

    @property
    def streams(self) -> int:
        """The open calls with any number of messages on this connection; 1 if unknown."""


#: The answer of a handler: a message, serialized or not.
Answer: TypeAlias = "Message | bytes"
Unary: TypeAlias = Callable[[Any, Context], Awaitable[Answer]]
Stream: TypeAlias = Callable[[AsyncIterator[Any], Send, Context], Awaitable[None]]
_Replied: TypeAlias = "asyncio.Future[bytes | HeadraceError]"
Direct: TypeAlias = Callable[[Any, Context, Reply], "Cancel | None"]


@dataclass(slots=True, eq=False)
class Rpc:
    """One RPC. ``parse`` turns the received bytes into the handler's request.

    Exactly one of three handlers is set. ``unary`` and ``stream`` run in a task of their own. ``direct`` answers by
    callback, now or later; it raises `HeadraceError` if it refuses now, and returns a function that cancels it.

    The handlers are replaced when the log becomes verbose, and when it no longer is (`use_handlers`). A host reads them
    for each call, or binds them again at `headrace.Log.on_change`.
    """

    service: str
    name: str
    #: Interceptors admit it before the message is parsed.
    operation: AnyOperation
    #: Takes bytes or a memoryview. Raises `TooLargeForLoop` for a message that ``parse_large`` must parse on a thread.
    parse: Callable[[Any], Any]
    unary: Unary | None = None
    stream: Stream | None = None
    direct: Direct | None = None
    parse_large: Callable[[Any], Any] | None = None
    #: ``direct`` for calls that all interceptors leave out; None if it does not matter.
    unadmitted: Direct | None = None
    #: Returns ``direct`` for calls, with messages as received, that only a recorder takes; with `Permits` and `Meters`
    #: as further arguments, also those that have them. Its second argument answers all others.
    recorded: Callable[..., Direct] | None = None
    #: Returns ``direct`` for calls, with messages as received, that `Permits` and `Meters` let pass: its second and
    #: third argument. The first one admits others.
    permitted: Callable[..., Direct] | None = None
    #: Number and name of the field of its message that names a model; None without one.
    model_field: tuple[int, str] | None = None

    def use_handlers(self, other: Rpc) -> None:
        """Answer further calls by the handlers of ``other``, which is the same RPC."""
        self.unary, self.stream, self.direct = other.unary, other.stream, other.direct

    def awaitable(self) -> Callable[[Any, Context], Awaitable[bytes]]:
        """Return ``unary`` or ``direct`` as a function to await, whose result goes on the wire."""
        if self.direct is not None:
            return awaited(self.direct)
        assert self.unary is not None
        unary, name = self.unary, self.name

        async def call(request: Any, context: Context) -> bytes:
            try:
                return serialize(await unary(request, context))
            except HeadraceError as error:
                log_fault(error, name)
                raise

        return call


def awaited(handler: Direct) -> Callable[[Any, Context], Awaitable[bytes]]:
    """Return ``handler`` as a coroutine function that waits for its answer."""

    async def call(request: Any, context: Context) -> bytes:
        # An error is a result, too: as an exception it would be logged if the caller has disconnected.
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
    if not future.done():  # done: the caller has disconnected
        future.set_result(answer)


def serialize(answer: Answer) -> bytes:
    """Return a handler's ``answer`` serialized."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def first(metadata: Metadata, key: str) -> str | None:
    """Return the first text under ``key``, or None."""
    for name, value in metadata:
        if name == key and isinstance(value, str):
            return value
    return None


def only(metadata: Metadata, name: bytes) -> str | None:
    """Return the text under ``name``. None if there is none; empty if there are several, or bytes."""
    key = name.decode()
    found = [value for other, value in metadata if other == key]
    if not found:
        return None
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


def texts(metadata: Metadata) -> list[tuple[str, str]]:
    """Return the entries that are text."""
    return [(name, value) for name, value in metadata if isinstance(value, str)]


def caller_of(context: Context) -> Caller:
    """Return the caller of the call."""
    found = getattr(context, "caller", None)
    if isinstance(found, Caller):
        return found
    metadata = context.metadata
    return Caller(
        "grpc",
        context.peer,
        context.certificate,
        partial(first, metadata),
        partial(texts, metadata),
        deadline_ns=context.deadline_ns,
    )
