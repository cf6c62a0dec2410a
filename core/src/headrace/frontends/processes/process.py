"""One frontend process, from its launch to its end, as the engine's process has it. Event loop only, but `launch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final

from headrace.errors import Code, HeadraceError, InternalError, LoadError
from headrace.frontends.processes.schema import FrontendKind, write_options
from headrace.frontends.processes.whole_calls import Tables, WholeCalls
from headrace.ipc.arena import Arena, Reader, Writer
from headrace.ipc.channel import FrameProtocol, Releases, connect
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind, frame, read_integers
from headrace.ipc.json_parts import json_frame, read_json
from headrace.ipc.peer_requests import IncomingRequests
from headrace.ipc.replies import Reply, reply_of, unsendable_reply
from headrace.large import LARGE_BYTES
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.remote_engine import write_view
from headrace.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace.supervision.exits import ExitWatcher, ending
from headrace.supervision.orphan_reaper import ORPHAN_REAPER

if TYPE_CHECKING:
    from headrace.engine import Engine, Offer

log = logging.getLogger(__name__)

#: Address space of each arena; memory is taken as it is used.
ARENA_BYTES: Final = 256 * 1024 * 1024
#: How long a process may take until it accepts connections: imports on a machine that is busy.
START_TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class LaunchedFrontend(ChildProcess):
    """A frontend process, as its parent holds it. The parent allocates in ``inbound`` and reads ``outbound``."""

    channel: socket.socket
    inbound: Arena
    outbound: Arena


def launch(name: str, listeners: Mapping[str, socket.socket]) -> LaunchedFrontend:
    """A process that waits to be told its options. It inherits ``listeners``, by name of the protocol. Blocks.

    Raises `LoadError` if it cannot be run.
    """
    with contextlib.ExitStack() as ours:
        channel, theirs = socket.socketpair()
        ours.enter_context(channel)
        inbound, outbound = Arena.create(ARENA_BYTES), Arena.create(ARENA_BYTES)
        ours.callback(inbound.close)
        ours.callback(outbound.close)
        crash_file: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
        with theirs:
            fds = {
                "channel": theirs.fileno(),
                "inbound": inbound.fd,
                "outbound": outbound.fd,
                "crash_file": crash_file.fileno(),
                **{protocol: listener.fileno() for protocol, listener in listeners.items()},
            }
            entry = "headrace.cli.frontend_process:serve"
            command = child_command(sys.executable, entry, name, (), **fds, arena_bytes=ARENA_BYTES)
            try:
                process = run_child(command, fds.values(), {})
            except OSError as error:
                raise LoadError(f"cannot start {name}: {error.strerror}") from error
        ours.pop_all()
    ORPHAN_REAPER.watch(process.pid)
    return LaunchedFrontend(process, crash_file, folders_of(("headrace",)), channel, inbound, outbound)


class FrontendProcess:
    """One life of a frontend process. ``name`` is what the log and ``ps`` call it."""

    def __init__(self, name: str, engine: Engine, tables: Tables) -> None:
        self.name = name
        self.is_dead = False
        self.ended = asyncio.Event()
        #: What became of it.
        self.reason = ""
        self._engine, self._tables = engine, tables
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._trouble = ""
        self._offered: dict[str, Offer] = {}
        self._launched: LaunchedFrontend | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._writer: Writer
        self._requests: IncomingInferences
        self._calls = WholeCalls(tables, self._send)

    async def start(self, listeners: Mapping[str, socket.socket]) -> None:
        """Returns once it accepts connections. Raises `HeadraceError`; then it is dead, or about to die."""
        launching = asyncio.ensure_future(asyncio.to_thread(launch, self.name, listeners))
        try:
            launched = await asyncio.shield(launching)
        except asyncio.CancelledError:
            launched = await launching
            launched.kill()
            await asyncio.to_thread(launched.wait)
            self._bury("was not needed any more")
            raise
        except HeadraceError as error:
            self._bury(error.message)
            raise
        self._launched = launched
        self._watcher = ExitWatcher(launched, self._end, partial(self.condemn, "closed its line and was killed"))
        self._writer = Writer(launched.inbound)
        decoder = Decoder(Reader(launched.outbound), Releases(self._soon, self._send).add)
        encoder = Encoder(self._writer, names_models=True)
        self._requests = IncomingInferences(encoder, decoder, self._engine, self._send)
        self._watcher.begin(self.name)
        self._transport = await connect(launched.channel, FrameProtocol(self._hear, self._hung_up, self._broken))
        self._send(json_frame(FrontendKind.START, write_options(self._engine.options)))
        self.tell_models()
        try:
            await asyncio.wait_for(asyncio.shield(self._started), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.condemn(f"did not start within {START_TIMEOUT_S:g} s and was killed")
            raise LoadError(f"{self.name} did not start within {START_TIMEOUT_S:g} s") from None

    def tell_models(self) -> None:
        """Tell what has changed since it was last told; nothing while there is no line to it."""
        if self._transport is None or self.is_dead:
            return
        offered, known = self._engine.offered(), self._offered
        changed = {name: offer for name, offer in offered.items() if known.get(name) != offer}
        gone = known.keys() - offered.keys()
        self._offered = offered
        if changed or gone:
            found: dict[str, Any] = {name: [(), ()] for name in gone}
            for name, offer in changed.items():
                found[name] = [offer.versions, [write_view(view) for view in offer.views]]
            self._send(json_frame(FrontendKind.MODELS, found))

    def drain(self) -> None:
        """Have it answer what it has, and exit."""
        if self._transport is None:  # it has just been launched, and nobody will ask it anything
            self.condemn("was not needed any more")
        self._send(frame(FrontendKind.DRAIN, 0))

    def condemn(self, why: str) -> None:
        """Kill it; the first reason is the one that is told."""
        self._trouble = self._trouble or why
        if self._launched is not None:
            self._launched.kill()

    # ------------------------------------------------------------------ its end

    def _hung_up(self) -> None:
        # Nobody waits for what it has asked; what it has said before is heard.
        self._watcher.hung_up()

    def _broken(self, error: Exception) -> None:
        log.error("%s broke the protocol", self.name, exc_info=error)
        self.condemn("sent a malformed message and was killed")

    def _end(self, code: int, report: str) -> None:
        if self.is_dead:
            return
        self._bury(f"{self._trouble or ending(code)}\n{report}".rstrip())
        if not self._started.done():
            self._started.set_exception(InternalError(f"{self.reason} while it was starting"))
            self._started.exception()  # whoever waits for it may have gone
        if self._transport is not None:
            self._transport.abort()
        self._requests.close()
        self._calls.close()
        assert self._launched is not None
        self._launched.inbound.close()
        self._launched.outbound.close()

    def _bury(self, what: str) -> None:
        """It is dead: ``what`` completes the sentence that its name begins."""
        self.is_dead, self.reason = True, f"{self.name} {what}"
        self.ended.set()

    # ------------------------------------------------------------------ the channel

    def _soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _send(self, message: bytes) -> None:
        if self._transport is not None and not self.is_dead:
            self._transport.write(message)

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if self._requests.hear(message, self._send):
            return
        if kind == Kind.RELEASE:
            for offset in read_integers(message):
                self._writer.release(offset)
        elif kind == FrontendKind.STARTED:
            if not self._started.done():
                self._started.set_result(None)
        elif kind == FrontendKind.FAILED:
            found = read_json(message)
            if not self._started.done():
                self._started.set_exception(HeadraceError(found["message"], Code(found["code"])))
                self._started.exception()
        else:
            self._calls.hear(message)


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
