"""Hundreds of requests, cancelled at random: waiting, executed, answered. Each is answered once, and nothing remains.

Real threads execute behind a gate that opens and closes at random; ``benchmarks/cancellations.py`` does the same to a
server over its protocols, ten thousand times.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic_ns

import numpy as np
import numpy.typing as npt
import pytest

from headrace.errors import Cancelled, HeadraceError, Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.server import Server
from tests.core.conftest import GATED, Gated, WriteModel

REQUESTS = 500
TWO = "instance_group { count: 2 kind: KIND_CPU }"
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 200 }"
ORDERED = "dynamic_batching { preserve_ordering: true }"
LIMITED = (
    "dynamic_batching { priority_levels: 2 default_priority_level: 1 default_queue_policy { max_queue_size: 20 "
    "default_timeout_microseconds: 2000 allow_timeout_override: true } priority_queue_policy { key: 2 value { "
    "timeout_action: DELAY default_timeout_microseconds: 500 } } }"
)
CACHED = "response_cache { enable: true }"


class Crowd:
    """Callers of one model. ``answers`` has the answer of each; a second one is an error."""

    def __init__(self, server: Server, model: str, chance: random.Random, questions: int) -> None:
        self.questions = questions
        self.server, self.model, self.chance = server, model, chance
        self.answers: dict[int, Answer] = {}
        self.refused = 0
        self.open: dict[int, Ticket] = {}
        self.wrong: list[str] = []

    def send(self, number: int) -> None:
        x = np.full((1, 2), self.chance.randrange(self.questions), np.float32)
        timeout_us = self.chance.choice((0, 0, 100, 1000))
        request = InferRequest(self.model, {"x": x}, id=str(number), priority=number % 3, timeout_us=timeout_us)
        ticket = Ticket(request, partial(self.receive, number, x))
        self.open[number] = ticket
        try:
            self.server.submit(ticket)
        except Unavailable:
            del self.open[number]
            self.refused += 1

    def receive(self, number: int, x: npt.NDArray[np.float32], answer: Answer, final: bool) -> None:
        if number in self.answers or not final:
            self.wrong.append(f"{number} got {answer} after {self.answers.get(number)}")
        self.answers[number] = answer
        if isinstance(answer, InferResponse):
            if answer.id != str(number) or not np.array_equal(np.asarray(answer.outputs["y"]), x):
                self.wrong.append(f"{number} got {answer}, which is another's")
        elif not isinstance(answer, Cancelled | Unavailable):
            self.wrong.append(f"{number} got {answer!r}")

    def leave(self) -> None:
        """Cancel a request, perhaps after its answer, perhaps twice."""
        number = self.chance.choice(list(self.open))
        self.open[number].cancel()


@pytest.mark.parametrize(
    ("text", "cache_bytes", "questions"),
    [
        ("", "", 4),
        (BATCHING + TWO, "", 4),
        (ORDERED + TWO, "", 4),
        (LIMITED, "", 4),
        (CACHED + BATCHING, "20000", 200),
        (CACHED + ORDERED, "1", 4),  # nothing is ever kept, so that many wait for one
    ],
    ids=["direct", "batching", "ordered", "limited", "cached", "cached-ordered"],
)
def test_every_request_is_answered_once_and_nothing_remains(
    make_server: Callable[..., Server],
    write_model: WriteModel,
    gated: type[Gated],
    text: str,
    cache_bytes: str,
    questions: int,
) -> None:
    write_model("m", GATED + text)
    options = {"cache_config": {"local": {"size": cache_bytes}}} if cache_bytes else {}
    seed = monotonic_ns() % 10**6
    chance = random.Random(seed)

    async def play(server: Server) -> Crowd:
        crowd = Crowd(server, "m", chance, questions)
        for number in range(REQUESTS):
            crowd.send(number)
            (gated.gate.set if chance.random() < 0.5 else gated.gate.clear)()
            for _ in range(chance.randrange(3)):
                if crowd.open:
                    crowd.leave()
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        gated.gate.set()
        (model,) = server.served("m")
        while model.model_queue.in_flight:
            await asyncio.sleep(0)
        return crowd

    with make_server(**options) as server:
        crowd = server._call(play, server)
        (model,) = server.served("m")
        snapshot = model.snapshot()
        assert crowd.wrong == [], f"seed {seed}"
        assert crowd.answers.keys() == crowd.open.keys(), f"seed {seed}"
        assert snapshot.pending == 0
        kinds = Counter(type(answer).__name__ for answer in crowd.answers.values())
        assert kinds["Cancelled"], f"seed {seed}: {kinds}"
        failed = sum(isinstance(answer, HeadraceError) for answer in crowd.answers.values())
        # A client that disconnects during the execution may still be answered: the request is then no failure.
        assert snapshot.success.count + snapshot.fail.count == len(crowd.answers) + crowd.refused, (
            f"seed {seed}: {failed}"
        )
