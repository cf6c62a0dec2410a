"""The thread of a child that hears what cannot wait until the batch is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from headrace.errors import summary
from headrace.workers.process.executor import Executor, Received
from headrace.workers.process.line import Line
from headrace.workers.process.remote import RemoteServices
from headrace.workers.process.sending import Sender
from headrace.workers.process.wire import notes
from headrace.workers.process.wire.codec import Decoder
from headrace.workers.process.wire.frames import Frame, Kind, read_integers


class Listener:
    """Reads ``side``: answers to what was asked, what became of requests, and whether the instance is ready."""

    def __init__(
        self, side: Line, decoder: Decoder, sender: Sender, services: RemoteServices, executor: Executor
    ) -> None:
        self._side, self._decoder, self._sender = side, decoder, sender
        self._services, self._executor = services, executor

    def listen(self) -> None:
        """Until the server has gone."""
        for message in self._side.frames():
            self._hear(message)
            self._sender.release()

    def _hear(self, message: Frame) -> None:
        kind = message.kind
        if kind is Kind.REPLIES:
            for reply in self._decoder.answers(message):
                self._services.replied(reply)
        elif kind is Kind.RESULT:
            self._services.resolved(notes.read_json(message))
        elif kind is Kind.RELEASE:
            self._sender.take_back(read_integers(message))
        elif kind is Kind.CANCEL:
            for request in self._mentioned(message):
                request.cancel()
        elif kind is Kind.ENOUGH:
            for request in self._mentioned(message):
                request.stop()
        elif kind is Kind.READ:
            for request in self._mentioned(message):
                request.read()
        elif kind is Kind.CHECK:
            threading.Thread(target=self._check, name="headrace-check", daemon=True).start()

    def _mentioned(self, message: Frame) -> Iterator[Received]:
        """The requests of ``message`` that have no last answer yet."""
        return filter(None, map(self._executor.open.get, read_integers(message)))

    def _check(self) -> None:
        """Ask the instance, on a thread of its own, whether it is ready."""
        try:
            ready, reason = bool(self._executor.instance.is_ready()), ""
        except BaseException as error:  # SystemExit of a model is a no, too
            ready, reason = False, summary(error)
        self._side.send(notes.json_frame(Kind.CHECKED, {"ready": ready, "reason": reason}))
