"""What a model under test answers."""

from __future__ import annotations

import threading

from headrace import Answer, BackendError, Call, InferRequest


class Record:
    """The answers to one request."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.answers: list[Answer] = []
        self.ended = threading.Event()

    def add(self, answer: Answer, final: bool) -> None:
        if answer is not None:
            self.answers.append(answer)
        if final:
            self.ended.set()

    def wait(self, timeout_s: float) -> list[Answer]:
        if not self.ended.wait(timeout_s):
            raise TimeoutError(f"the model gave no last answer within {timeout_s} s")
        return self.answers


class RecordedCall(Call):
    """Writes into its record; one that is let go without a last answer says so."""

    def __init__(self, record: Record) -> None:
        self.request = record.request
        self._record = record

    def send(self, answer: Answer, final: bool = True) -> None:
        self._record.add(answer, final)

    def __del__(self) -> None:
        if not self._record.ended.is_set():
            self._record.add(BackendError("the model gave no last answer"), True)
