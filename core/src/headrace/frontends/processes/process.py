"""One frontend process, as the engine's process has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import HeadraceError, InternalError
from headrace.frontends.processes.schema import FrontendKind, write_options
from headrace.frontends.processes.whole_calls import Tables, WholeCalls
from headrace.ipc.arena import Arena, Reader, Writer
from headrace.ipc.channel import Releases
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind, read_integers
from headrace.ipc.json_parts import json_frame
from headrace.ipc.peer_requests import IncomingRequests
from headrace.ipc.replies import Reply, reply_of, unsendable_reply
from headrace.large import LARGE_BYTES
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.remote_engine import write_view
from headrace.supervision.supervised_process import LaunchedProcess, SupervisedProcess, launch

if TYPE_CHECKING:
    from headrace.engine import Engine, Offer

log = logging.getLogger(__name__)

#: Address space of each arena; memory is taken as it is used.
ARENA_BYTES: Final = 256 * 1024 * 1024
#: How long a process may take until it accepts connections: imports on a machine that is busy.
START_TIMEOUT_S: Final = 120.0
_CALLS: Final = frozenset((FrontendKind.CALL, FrontendKind.TAKEN, FrontendKind.LEFT))


class FrontendProcess(SupervisedProcess):
    """One life of a frontend process, which inherits ``listeners``, by name of the protocol. The engine allocates in
    ``inbound`` and reads ``outbound``."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, name: str, engine: Engine, tables: Tables, listeners: Mapping[str, socket.socket]) -> None:
        super().__init__(name)
        self._engine, self._listeners = engine, listeners
        self._offered: dict[str, Offer] = {}
        self._inbound, self._outbound = Arena.create(ARENA_BYTES), Arena.create(ARENA_BYTES)
        self._writer = Writer(self._inbound)
        decoder = Decoder(Reader(self._outbound), Releases(self.soon, self.send).add)
        encoder = Encoder(self._writer, names_models=True)
        self._requests = IncomingInferences(encoder, decoder, engine, self.send)
        self._calls = WholeCalls(tables, self.send)

    def launch(self) -> LaunchedProcess:
        fds = {"inbound": self._inbound.fd, "outbound": self._outbound.fd}
        fds |= {protocol: listener.fileno() for protocol, listener in self._listeners.items()}
        return launch(self.name, "headrace.cli.frontend_process:serve", fds, arena_bytes=ARENA_BYTES)

    def settings(self) -> Mapping[str, Any]:
        return write_options(self._engine.options)

    def introduce(self) -> None:
        self.tell_models()

    def tell_models(self) -> None:
        """Tell what has changed since it was last told; nothing while there is no line to it."""
        if not self.is_connected:
            return
        offered, known = self._engine.offered(), self._offered
        changed = {name: offer for name, offer in offered.items() if known.get(name) != offer}
        gone = known.keys() - offered.keys()
        self._offered = offered
        if changed or gone:
            found: dict[str, Any] = {name: [(), ()] for name in gone}
            for name, offer in changed.items():
                found[name] = [offer.versions, [write_view(view) for view in offer.views]]
            self.send(json_frame(FrontendKind.MODELS, found))

    def hear(self, message: Frame) -> None:
        if self._requests.hear(message, self.send):
            return
        kind = message.kind
        if kind == Kind.RELEASE:
            for offset in read_integers(message):
                self._writer.release(offset)
        elif kind in _CALLS:
            self._calls.hear(message)
        else:
            super().hear(message)

    def close(self) -> None:
        self._requests.close()
        self._calls.close()
        self._inbound.close()
        self._outbound.close()


class IncomingInferences(IncomingRequests):
    """The requests of a frontend process, and their answers: those of one turn of the loop in one message."""

    def __init__(self, encoder: Encoder, decoder: Decoder, engine: Engine, send: Callable[[bytes], None]) -> None:
        super().__init__(encoder, decoder, self._start, Ticket.cancel, {})
        self._entrance = engine.entrance()
        self._large = engine.large_work
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._replies: list[Reply] = []

    def _start(self, ticket: Ticket) -> None:
        """Have ``ticket`` answered by whatever serves now; a refusal is an answer."""
        try:
            for tensor in ticket.request.inputs.values():
                if type(tensor) is BytesTensor and tensor.nbytes > LARGE_BYTES:
                    self._large.begin(partial(_find_strings, ticket), partial(self._start_found, ticket))
                    return
            self._entrance.submit(ticket)
        except HeadraceError as error:
            ticket.respond(error.with_traceback(None), True)
        except Exception:
            log.exception("a request to model '%s' failed", ticket.request.model_name)
            ticket.respond(InternalError("the request failed inside the server; its log has the reason"), True)

    def _start_found(self, ticket: Ticket, outcome: Exception | None) -> None:
        try:
            self._entrance.submit(ticket)
        except HeadraceError as error:
            ticket.respond(error.with_traceback(None), True)

    def _reply(self, send: Callable[[bytes], None], call: int, answer: Answer, final: bool) -> None:
        if not self._replies:
            self._loop.call_soon(self._flush)
        self._replies.append(reply_of(call, answer, final))

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        if self._is_closed:
            return
        try:
            self._send(self._encoder.answers(replies))
        except ValueError as error:
            self._send_apart(replies, error)

    def _send_apart(self, replies: list[Reply], error: ValueError) -> None:
        """Send those of ``replies`` that can travel, since together they cannot."""
        for reply in replies:
            try:
                message = self._encoder.answers([reply])
            except ValueError as reason:
                message = self._encoder.answers([unsendable_reply(reply, reason)])
            self._send(message)


def _find_strings(ticket: Ticket) -> None:
    """Find the strings of large inputs here, and not on the event loop, which is to check them."""
    for tensor in ticket.request.inputs.values():
        if type(tensor) is BytesTensor:
            with contextlib.suppress(HeadraceError):  # refused by the check, in words of its own
                tensor.offsets  # noqa: B018
