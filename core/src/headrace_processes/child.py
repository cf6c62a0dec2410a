"""One child process, from launch to end, on the server's side. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from anyio import move_on_after

from headrace.backends.base import Isolation
from headrace.errors import LoadError
from headrace.executors.threads import LoopMailbox
from headrace_processes.batch_channel import BatchChannel, BatchSink
from headrace_processes.handshake import ChildKind, Handshake, InstanceSpec
from headrace_processes.ipc.arena import Reader, Writer
from headrace_processes.ipc.channel import FrameProtocol, ReleasedPlaces, Releases, connect
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import Frame, Kind, frame, read_integers
from headrace_processes.ipc.mappings import SentMappings
from headrace_processes.ipc.peer_requests import FastPathReplies
from headrace_processes.launch import Launched, launch
from headrace_processes.remote_services import ServiceEndpoint
from headrace_processes.supervision.child_memory import memory_of
from headrace_processes.supervision.exits import LAST_READ_S, ExitWatcher, ending, read_crash_report

log = logging.getLogger(__name__)

_TIMEOUT_SET_BY = "parameter 'load_timeout_seconds', or load-timeout-seconds of --backend-config"
_OF_BATCHES: Final = frozenset((Kind.ALIKE_DONE, Kind.DONE, Kind.LAYOUT))
_LAUNCHES = ThreadPoolExecutor(4, "headrace-launch")


class Owner(BatchSink, Protocol):
    """The owner of a child: a `headrace_processes.process_executor.ProcessExecutor`."""

    def child_died(self, child: Child, reason: str) -> None:
        """``child`` is dead. Its requests in flight are in ``child.batches.in_flight``."""


class Child:
    """The connection to one process. ``batches`` exists from the start of the process until ``has_hung_up``."""

    #: The UUIDs of the GPUs that the server finds, for an instance that may send tensors there.
    _gpus: Sequence[str] = ()

    def __init__(self, spec: InstanceSpec, isolation: Isolation, endpoint: ServiceEndpoint, owner: Owner) -> None:
        self.batches: BatchChannel
        self.has_check = False
        self.has_hung_up = False
        self.is_dead = False
        self._name = spec.instance_name
        self._spec, self._isolation, self._endpoint, self._owner = spec, isolation, endpoint, owner
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._launched: Launched
        self._soon: Callable[[Callable[[], None]], object]
        self._watcher: ExitWatcher
        self._work: asyncio.WriteTransport
        self._side: asyncio.WriteTransport
        self._direct: FastPathReplies
        self._released: ReleasedPlaces
        self._mappings: SentMappings
        self._handshake = Handshake(self._name, self._send_aside)
        self._trouble = ""
        self._is_open = self._is_stopping = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Launch the process and load its instance. Raises `LoadError`; the process is then dead.

        If this is cancelled, it ends the process, too.
        """
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(opening)
            await self._load()
        except BaseException:
            self._handshake.loaded.cancel()
            await opening
            await self.kill("is not needed")
            raise

    async def _open(self) -> None:
        """Start the process, and open the channels to it."""
        # Not on the loop's default threads: these may all be waiting for models that load in processes.
        self._launched = launched = await self._loop.run_in_executor(
            _LAUNCHES, launch, self._name, self._isolation, self._gpus
        )
        self._watcher = watcher = ExitWatcher(launched, self._end, self._cut_off)
        writer = Writer(launched.inbound)
        self._released = ReleasedPlaces(writer)
        self._soon = soon = LoopMailbox(self._loop).send
        self._mappings = SentMappings(launched.descriptors, Releases(soon, self._send_work, Kind.UNMAP).add)
        encoder, decoder = self._codec(writer, Reader(launched.outbound), Releases(soon, self._send_aside).add)
        self._work = await connect(launched.work, FrameProtocol(self._hear, self._hung_up, self._broken))
        self.batches = self._channel(encoder, decoder)
        self._endpoint.open(encoder, decoder, self._send_aside, self.batches.in_flight)
        self._side = await connect(launched.side, FrameProtocol(self._hear, watcher.lost_channel, self._broken))
        direct = await connect(launched.direct, FrameProtocol(self._hear_direct, watcher.lost_channel, self._broken))
        self._direct = FastPathReplies(direct, launched.at_once)
        watcher.begin(self._name)
        self._is_open = True

    def _codec(self, writer: Writer, reader: Reader, free: Callable[[int], None]) -> tuple[Encoder, Decoder]:
        """Return what encodes the messages to the child, and what decodes its own."""
        return Encoder(writer, self._mappings), Decoder(reader, free)

    def _channel(self, encoder: Encoder, decoder: Decoder) -> BatchChannel:
        busy_poll_us = self._isolation.busy_poll_us
        return BatchChannel(self._name, encoder, decoder, self._work, self._send_aside, self._owner, busy_poll_us)

    async def _load(self) -> None:
        """Send what to load, and wait until it is loaded. Raises `LoadError`."""
        self._work.write(frame(ChildKind.LOAD, 0, self._spec.to_json()))
        timeout = self._isolation.start_timeout_s + self._isolation.load_timeout_s
        done, _ = await asyncio.wait((self._handshake.loaded,), timeout=timeout)
        if not done:
            self._launched.process.send_signal(signal.SIGUSR1)  # it then writes its traceback
            await asyncio.sleep(LAST_READ_S)
            where = await asyncio.to_thread(read_crash_report, self._launched)
            raise LoadError(
                f"model instance '{self._name}' did not load within {timeout:g} s ({_TIMEOUT_SET_BY})\n{where}".rstrip()
            )
        self.has_check = self._handshake.loaded.result()

    async def check(self) -> bool:
        """True if the instance is ready. Raises `Unavailable` if it gives a reason why not."""
        return await self._handshake.check()

    def hand_over(self, owner: Owner) -> None:
        """Make ``owner`` the owner of the child."""
        self._owner = self.batches.sink = owner

    def memory_bytes(self) -> int:
        """Return the memory of the process and of its arenas, in bytes; 0 if it has ended. Any thread."""
        process = self._launched.process
        return memory_of(process.pid) if process.returncode is None else 0

    # ------------------------------------------------------------------ end

    async def stop(self, timeout_s: float) -> None:
        """Close the instance. Kill the process if that takes longer than ``timeout_s``."""
        self._is_stopping = True
        self._send_work(frame(ChildKind.CLOSE, 0))
        with move_on_after(timeout_s):
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning("instance '%s' did not close within %g s and is killed", self._name, timeout_s)
            await self.kill("did not close in time")

    async def kill(self, why: str) -> None:
        """End the process now, and wait for its end."""
        self._condemn(why)
        await self._ended.wait()

    def stop_loading(self) -> None:
        """Make `start` fail soon, because the instance is no longer needed."""
        if self._is_open and not self._handshake.loaded.done():
            self._condemn("was unloaded")

    def abandon(self) -> None:
        """End the process without waiting for it."""
        self._is_stopping = True
        if self._is_open and not self.is_dead:
            self._launched.kill()
            self._let_go()

    def _condemn(self, why: str) -> None:
        """Kill the process. Only the first reason is reported."""
        self._trouble = self._trouble or why
        self._launched.kill()

    def _cut_off(self) -> None:
        self._condemn("closed its channel and was killed")

    def _broken(self, error: Exception) -> None:
        """Kill the child, which has sent a malformed message and cannot be trusted any more."""
        log.error("instance '%s' broke the protocol", self._name, exc_info=error)
        self._condemn("sent a malformed message and was killed")

    def _hung_up(self) -> None:
        self.has_hung_up = True
        self._watcher.hung_up()

    def _end(self, code: int, report: str) -> None:
        """Finish: the process has ended, and no more messages follow."""
        if self.is_dead:
            return
        reason = f"model instance '{self._name}' {self._trouble or ending(code)}"
        was_loaded = self._handshake.loaded.done()
        self._let_go()
        self._handshake.end(reason, report)
        if was_loaded and (self.batches.in_flight or not self._is_stopping):
            self._owner.child_died(self, f"{reason}\n{report}".rstrip())

    def _let_go(self) -> None:
        self.is_dead = True
        for channel in (self._work, self._side):
            channel.abort()
        self._direct.close()
        self._endpoint.close()
        self._launched.close()
        self._ended.set()

    # ------------------------------------------------------------------ the channels

    # A channel is closing, and refuses a message, for a moment before the end of a killed process is noticed.

    def _send_aside(self, message: bytes) -> None:
        if not self._side.is_closing():
            self._side.write(message)

    def _send_work(self, message: bytes) -> None:
        if not self._work.is_closing():
            self._work.write(message)

    def _send_direct(self, message: bytes) -> None:
        if not self.is_dead:
            self._direct.send(message)

    def _hear_direct(self, message: Frame) -> None:
        self._endpoint.hear(message, self._send_direct, self._direct.send_at_once)

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind in _OF_BATCHES:
            self.batches.done(message)
        elif kind == Kind.ANSWERS:
            self.batches.hear(message)
        elif kind == Kind.RELEASE:
            self._released.hear(message)
        elif kind == Kind.LOST:
            self._mappings.lose(read_integers(message))
        elif not self._handshake.hear(message):
            self._endpoint.hear(message, self._send_aside)
