"""The short way to another model: the thread that asks reads the answer itself.

On the side line a thread of the child's reads all answers and wakes whoever waits; that switch costs
more than the rest of a small call.
"""

from __future__ import annotations

import threading

from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.workers.process.line import Line
from headrace.workers.process.wire.codec import Decoder, Encoder
from headrace.workers.process.wire.frames import Kind
from headrace.workers.process.wire.requests import unsendable_request
from headrace.workers.process.wire.tensors import INLINE


class DirectCalls:
    """One request at a time over ``line``; large tensors take the other way, through the arena."""

    def __init__(self, line: Line, decoder: Decoder) -> None:
        self._line, self._decoder = line, decoder
        self._frames = line.frames()
        self._encoder = Encoder(None)
        self._turn = threading.Lock()

    def take_turn(self, request: InferRequest) -> bool:
        """Whether ``request`` may go this way now; then `ask` must follow."""
        is_small = all(tensor.nbytes < INLINE for tensor in request.inputs.values())  # type: ignore[union-attr]
        return is_small and self._turn.acquire(blocking=False)

    def ask(self, call: int, request: InferRequest) -> Answer:
        """The last answer that said something; gives the turn back."""
        try:
            message = self._encoder.requests(Kind.INFER, [(call, request)])
        except ValueError as error:
            self._turn.release()
            return unsendable_request(error)
        self._line.send(message)
        answer = self._answer()
        # Not in a finally: a thread that an exception (of a signal's handler) takes away from here leaves
        # an answer behind, which nobody may take for another's. All go the other way then.
        self._turn.release()
        return answer

    def _answer(self) -> Answer:
        said: Answer = None
        while True:
            for reply in self._decoder.answers(next(self._frames)):
                said = reply.answer or said
                if reply.final:
                    return said
