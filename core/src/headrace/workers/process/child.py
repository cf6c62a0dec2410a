"""One life of a child process, as its server sees it: from launch to burial. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from headrace.backends.base import Isolation
from headrace.errors import LoadError
from headrace.workers.crossing import Crossing
from headrace.workers.process.arena import Reader, Writer
from headrace.workers.process.desk import Desk
from headrace.workers.process.exits import ending
from headrace.workers.process.launching import Launched, launch
from headrace.workers.process.order import Order
from headrace.workers.process.questions import Questions
from headrace.workers.process.receiving import Receiver, receive
from headrace.workers.process.releases import Releases
from headrace.workers.process.replies import DirectReplies
from headrace.workers.process.traffic import Recipient, Traffic
from headrace.workers.process.vigil import LAST_READ_S, Vigil
from headrace.workers.process.wire.codec import Decoder, Encoder
from headrace.workers.process.wire.frames import Frame, Kind, frame, read_integers

log = logging.getLogger(__name__)

_LAUNCHES = ThreadPoolExecutor(4, "headrace-launch")


class Owner(Recipient, Protocol):
    """Whoever has a child: a `headrace.workers.process.worker.ProcessWorker`."""

    def child_died(self, child: Child, reason: str) -> None:
        """``child`` is dead and buried; what it had in flight is left in ``child.traffic.in_flight``."""


class Child:
    """Speaks with one process. ``traffic`` is there once it has started, and goes on until ``has_hung_up``."""

    def __init__(self, order: Order, isolation: Isolation, desk: Desk, owner: Owner) -> None:
        self.traffic: Traffic
        self.has_check = False
        self.has_hung_up = False
        self.is_dead = False
        self._name = order.instance_name
        self._order, self._isolation, self._desk, self._owner = order, isolation, desk, owner
        self._loop = asyncio.get_running_loop()
        self._buried = asyncio.Event()
        self._launched: Launched
        self._vigil: Vigil
        self._work: asyncio.WriteTransport
        self._side: asyncio.WriteTransport
        self._direct: DirectReplies
        self._places: Writer
        self._questions = Questions(self._name, self._send_aside)
        self._trouble = ""
        self._is_open = self._is_stopping = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Launch the process and have it load its instance. Raises `LoadError`; then it is dead.

        Cancelled, it leaves no process behind either.
        """
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(opening)
            await self._load()
        except BaseException:
            self._questions.loaded.cancel()
            await opening
            await self.kill("is not needed")
            raise

    async def _open(self) -> None:
        """Start the process, and the lines to it."""
        # Not on the loop's own threads: those may all wait for models that are to be loaded in processes.
        self._launched = launched = await self._loop.run_in_executor(_LAUNCHES, launch, self._name, self._isolation)
        self._vigil = vigil = Vigil(launched, self._bury, self._cut_off)
        self._places = Writer(launched.inbound)
        encoder = Encoder(self._places)
        decoder = Decoder(Reader(launched.outbound), Releases(Crossing(self._loop), self._send_aside).add)
        self._work = await receive(launched.work, Receiver(self._hear, self._hung_up, self._broken))
        busy_poll_us = self._isolation.busy_poll_us
        self.traffic = Traffic(self._name, encoder, decoder, self._work, self._send_aside, self._owner, busy_poll_us)
        self._desk.open(encoder, decoder, self._send_aside, self.traffic.in_flight)
        self._side = await receive(launched.side, Receiver(self._hear, vigil.lost_line, self._broken))
        direct = await receive(launched.direct, Receiver(self._hear_direct, vigil.lost_line, self._broken))
        self._direct = DirectReplies(direct, launched.at_once)
        vigil.begin(self._name)
        self._is_open = True

    async def _load(self) -> None:
        """Send the order, and wait until it is carried out. Raises `LoadError`."""
        self._work.write(frame(Kind.LOAD, 0, self._order.to_json()))
        timeout = self._isolation.start_timeout_s + self._isolation.load_timeout_s
        done, _ = await asyncio.wait((self._questions.loaded,), timeout=timeout)
        if not done:
            self._launched.process.send_signal(signal.SIGUSR1)  # it writes where it is
            await asyncio.sleep(LAST_READ_S)
            where = await asyncio.to_thread(self._launched.last_words)
            raise LoadError(f"model instance '{self._name}' did not load within {timeout:g} s\n{where}".rstrip())
        self.has_check = self._questions.loaded.result()

    async def check(self) -> bool:
        """Whether the instance says that it is ready; raises `Unavailable` if it says why not."""
        return await self._questions.check()

    def hand_over(self, owner: Owner) -> None:
        """From now on ``owner`` has the child."""
        self._owner = self.traffic.recipient = owner

    # ------------------------------------------------------------------ death

    async def stop(self, grace_s: float) -> None:
        """Have the instance closed; kill the process if that takes longer than ``grace_s``."""
        self._is_stopping = True
        if not self.is_dead:
            self._work.write(frame(Kind.STOP, 0))
        try:
            await asyncio.wait_for(self._buried.wait(), grace_s)
        except asyncio.TimeoutError:
            log.warning("instance '%s' did not close within %g s and is killed", self._name, grace_s)
            await self.kill("did not close in time")

    async def kill(self, why: str) -> None:
        """End the process now."""
        self._condemn(why)
        await self._buried.wait()

    def stop_loading(self) -> None:
        """Nobody waits for the instance any more: `start` fails soon."""
        if self._is_open and not self._questions.loaded.done():
            self._condemn("was unloaded")

    def abandon(self) -> None:
        """End the process without waiting for it."""
        self._is_stopping = True
        if self._is_open and not self.is_dead:
            self._launched.kill()
            self._let_go()

    def _condemn(self, why: str) -> None:
        """Kill the process; the first reason is the one that is told."""
        self._trouble = self._trouble or why
        self._launched.kill()

    def _cut_off(self) -> None:
        self._condemn("closed its line and was killed")

    def _broken(self, error: Exception) -> None:
        """The child has sent nonsense: it is beyond trust."""
        log.error("instance '%s' broke the protocol", self._name, exc_info=error)
        self._condemn("sent a malformed message and was killed")

    def _hung_up(self) -> None:
        self.has_hung_up = True
        self._vigil.hung_up()

    def _bury(self, code: int, words: str) -> None:
        """The process has ended, and nothing more will come."""
        if self.is_dead:
            return
        reason = f"model instance '{self._name}' {self._trouble or ending(code)}"
        was_loaded = self._questions.loaded.done()
        self._let_go()
        self._questions.end(reason, words)
        if was_loaded and (self.traffic.in_flight or not self._is_stopping):
            self._owner.child_died(self, f"{reason}\n{words}".rstrip())

    def _let_go(self) -> None:
        self.is_dead = True
        for line in (self._work, self._side):
            line.abort()
        self._direct.close()
        self._desk.close()
        self._launched.close()
        self._buried.set()

    # ------------------------------------------------------------------ the lines

    def _send_aside(self, message: bytes) -> None:
        if not self.is_dead:
            self._side.write(message)

    def _send_direct(self, message: bytes) -> None:
        if not self.is_dead:
            self._direct.send(message)

    def _hear_direct(self, message: Frame) -> None:
        self._desk.hear(message, self._send_direct, self._direct.send_at_once)

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind is Kind.DONE:
            self.traffic.done(message)
        elif kind is Kind.ANSWERS:
            self.traffic.answers(message)
        elif kind is Kind.RELEASE:
            for offset in read_integers(message):
                self._places.release(offset)
        elif kind is Kind.LOADED or kind is Kind.FAILED or kind is Kind.CHECKED:
            self._questions.hear(message)
        else:
            self._desk.hear(message, self._send_aside)
