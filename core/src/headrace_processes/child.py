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
from headrace_processes.ipc.channel import FrameProtocol, ReleasedBlocks, Releases, connect
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import Frame, Kind, frame, read_integers
from headrace_processes.ipc.mappings import SentMappings
from headrace_processes.ipc.peer_requests import FastPathReplies
from headrace_processes.launch import LaunchedChild, launch
from headrace_processes.remote_services import ServiceEndpoint
from headrace_processes.supervision.child_memory import memory_of
from headrace_processes.supervision.exits import LAST_READ_S, ExitWatcher, ending, read_crash_report

log = logging.getLogger(__name__)

_TIMEOUT_SET_BY = "parameter 'load_timeout_seconds', or load-timeout-seconds of --backend-config"
_BATCH_KINDS: Final = frozenset((Kind.ALIKE_DONE, Kind.DONE, Kind.LAYOUT))
_LAUNCH_THREADS = ThreadPoolExecutor(4, "headrace-launch")


class Owner(BatchSink, Protocol):
    """The owner of a child: a `headrace_processes.process_executor.ProcessExecutor`."""

    def child_died(self, child: Child, reason: str) -> None:
        """Note that ``child`` is dead. Its requests in flight are in ``child.batches.in_flight``."""


class Child:
    """The connection to one process. ``batches`` exists from the start of the process until ``has_hung_up``."""

    #: The UUIDs of the server's GPUs, if the instance may send tensors on them.
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
        self._launched: LaunchedChild
        self._call_soon: Callable[[Callable[[], None]], object]
        self._watcher: ExitWatcher
        self._work: asyncio.WriteTransport
        self._side: asyncio.WriteTransport
        self._direct: FastPathReplies
        self._released: ReleasedBlocks
        self._mappings: SentMappings
        self._handshake = Handshake(self._name, self._send_aside)
        self._kill_reason = ""
        self._is_open = self._is_stopping = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Launch the process and load its instance. Raises `LoadError`; the process is then dead.

        If it is cancelled, it kills the process.
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
            _LAUNCH_THREADS, launch, self._name, self._isolation, self._gpus
        )
        self._watcher = watcher = ExitWatcher(launched, self._end, self._cut_off)
        writer = Writer(launched.inbound)
        self._released = ReleasedBlocks(writer)
        self._call_soon = soon = LoopMailbox(self._loop).send
        self._mappings = SentMappings(launched.descriptors, Releases(soon, self._send_work, Kind.UNMAP).add)
        encoder, decoder = self._codec(writer, Reader(launched.outbound), Releases(soon, self._send_aside).add)
        self._work = await connect(launched.work, FrameProtocol(self._receive, self._hung_up, self._broken))
        self.batches = self._channel(encoder, decoder)
        self._endpoint.open(encoder, decoder, self._send_aside, self.batches.in_flight)
        self._side = await connect(launched.side, FrameProtocol(self._receive, watcher.lost_channel, self._broken))
        direct = await connect(launched.direct, FrameProtocol(self._receive_direct, watcher.lost_channel, self._broken))
        self._direct = FastPathReplies(direct, launched.direct_at_once)
        watcher.begin(self._name)
        self._is_open = True

    def _codec(self, writer: Writer, reader: Reader, free: Callable[[int], None]) -> tuple[Encoder, Decoder]:
        """Return the encoder of messages to the child, and the decoder of messages from it."""
        return Encoder(writer, self._mappings), Decoder(reader, free)

    def _channel(self, encoder: Encoder, decoder: Decoder) -> BatchChannel:
        busy_poll_us = self._isolation.busy_poll_us
        return BatchChannel(self._name, encoder, decoder, self._work, self._send_aside, self._owner, busy_poll_us)

    async def _load(self) -> None:
        """Send the instance spec, and wait until it is loaded. Raises `LoadError`."""
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
        """Close the instance. If that takes longer than ``timeout_s``, kill the process."""
        self._is_stopping = True
        self._send_work(frame(ChildKind.CLOSE, 0))
        with move_on_after(timeout_s):
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning("instance '%s' did not close within %g s and is killed", self._name, timeout_s)
            await self.kill("did not close in time")

    async def kill(self, reason: str) -> None:
        """Kill the process, and wait until it has exited."""
        self._kill(reason)
        await self._ended.wait()

    def stop_loading(self) -> None:
        """Make `start` fail soon, because the instance is no longer needed."""
        if self._is_open and not self._handshake.loaded.done():
            self._kill("was unloaded")

    def abandon(self) -> None:
        """Kill the process without waiting for its exit."""
        self._is_stopping = True
        if self._is_open and not self.is_dead:
            self._launched.kill()
            self._release()

    def _kill(self, reason: str) -> None:
        """Kill the process. Only the first reason is reported."""
        self._kill_reason = self._kill_reason or reason
        self._launched.kill()

    def _cut_off(self) -> None:
        self._kill("closed its channel and was killed")

    def _broken(self, error: Exception) -> None:
        """Kill the child, which has sent a malformed message and cannot be trusted any more."""
        log.error("instance '%s' broke the protocol", self._name, exc_info=error)
        self._kill("sent a malformed message and was killed")

    def _hung_up(self) -> None:
        self.has_hung_up = True
        self._watcher.hung_up()

    def _end(self, code: int, report: str) -> None:
        """Finish: the process has ended, and no more messages follow."""
        if self.is_dead:
            return
        reason = f"model instance '{self._name}' {self._kill_reason or ending(code)}"
        was_loaded = self._handshake.loaded.done()
        self._release()
        self._handshake.end(reason, report)
        if was_loaded and (self.batches.in_flight or not self._is_stopping):
            self._owner.child_died(self, f"{reason}\n{report}".rstrip())

    def _release(self) -> None:
        self.is_dead = True
        for channel in (self._work, self._side):
            channel.abort()
        self._direct.close()
        self._endpoint.close()
        self._launched.close()
        self._ended.set()

    # ------------------------------------------------------------------ the channels

    # When a process is killed, its channels close before its exit is detected. They refuse messages in between.

    def _send_aside(self, message: bytes) -> None:
        if not self._side.is_closing():
            self._side.write(message)

    def _send_work(self, message: bytes) -> None:
        if not self._work.is_closing():
            self._work.write(message)

    def _send_direct(self, message: bytes) -> None:
        if not self.is_dead:
            self._direct.send(message)

    def _receive_direct(self, message: Frame) -> None:
        self._endpoint.receive(message, self._send_direct, self._direct.send_at_once)

    def _receive(self, message: Frame) -> None:
        kind = message.kind
        if kind in _BATCH_KINDS:
            self.batches.done(message)
        elif kind == Kind.ANSWERS:
            self.batches.receive(message)
        elif kind == Kind.RELEASE:
            self._released.receive(message)
        elif kind == Kind.LOST:
            self._mappings.mark_lost(read_integers(message))
        elif not self._handshake.receive(message):
            self._endpoint.receive(message, self._send_aside)
