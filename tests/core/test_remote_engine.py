"""An engine and the one that a frontend process has, joined by what would travel between the two."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from headrace.engine import not_over_http
from headrace.errors import HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.frontends.processes.incoming import IncomingInferences
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import FrameParser, Kind
from headrace.messages.request import InferRequest, Undecoded
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import BytesTensor, Tensor
from headrace.messages.ticket import Ticket
from headrace.remote_engine import RemoteEngine, RemoteRequests, write_view
from headrace.server import Server

CONFIGS = {
    "echo": 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [-1] } '
    'output { name: "y" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }',
    "reshaped": 'input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } } '
    'output { name: "y" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } }',
    "strings": 'input { name: "x" data_type: TYPE_STRING dims: [-1] } '
    'output { name: "y" data_type: TYPE_STRING dims: [-1] }',
}

X = [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}]
Y = [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, config in CONFIGS.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "identity" {config}')
    (tmp_path / "echo" / "labels.txt").write_text("ant\nbee\n")
    return tmp_path


class Joined:
    """``remote`` asks ``server``. ``sent`` are the kinds and counts of the messages, those of answers included."""

    def __init__(self, server: Server) -> None:
        self.sent: list[tuple[int, int]] = []
        self._there, self._here = FrameParser(), FrameParser()
        self._incoming = IncomingInferences(
            Encoder(None, names_models=True), Decoder(None, _nothing), server.engine, self._come
        )
        self.requests = RemoteRequests(Encoder(None, names_models=True), Decoder(None, _nothing), self._go)
        self.remote = RemoteEngine(server.options, self.requests)
        self.server = server
        self.tell()

    def tell(self) -> None:
        for name, offer in self.server.engine.offered().items():
            self.remote.change(name, offer.versions, [write_view(view) for view in offer.views])

    def _go(self, message: bytes) -> None:
        for frame in self._there.feed(message):
            self.sent.append((frame.kind, frame.number))
            assert self._incoming.hear(frame, self._come)

    def _come(self, message: bytes) -> None:
        for frame in self._here.feed(message):
            self.sent.append((frame.kind, frame.number))
            self.requests.hear(frame)

    def start(
        self, model: str, tensor: Tensor | Undecoded, id: str = "", **rest: Any
    ) -> tuple[Ticket, asyncio.Future[Answer]]:
        """Raises what refuses it here."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            InferRequest(model, {"x": tensor}, id=id, **rest), lambda answer, final: answered.set_result(answer)
        )
        self.remote.entrance(not_over_http).submit(ticket)
        return ticket, answered


def _nothing(offset: int) -> None:
    """Nothing lies in an arena here."""


def run(models: Path, test: Callable[[Joined], object], **options: Any) -> None:
    async def main() -> None:
        async with Server(models, **options) as server:
            await test(Joined(server))  # type: ignore[misc]

    asyncio.run(main())


def counts(joined: Joined, *kinds: Kind) -> list[int]:
    return [count for kind, count in joined.sent if kind in kinds]


def test_requests_of_one_turn_travel_together_and_are_told_apart(models: Path) -> None:
    async def test(joined: Joined) -> None:
        for turn in range(3):
            joined.sent.clear()
            rows = [np.full((1, 2), 10 * turn + number, np.float32) for number in range(5)]
            asked = [joined.start("echo", row, f"id {number}") for number, row in enumerate(rows)]
            for number, (row, (_, answered)) in enumerate(zip(rows, asked, strict=True)):
                answer = await answered
                assert isinstance(answer, InferResponse)
                assert np.array_equal(np.asarray(answer.outputs["y"]), row)
                assert (answer.id, answer.model_name, answer.model_version) == (f"id {number}", "echo", "1")
            if turn:  # the first was the first of its shape
                assert joined.sent[0] == (Kind.ALIKE_REQUESTS, 5)
                assert counts(joined, Kind.REQUESTS, Kind.ANSWERS, Kind.LAYOUT) == []
            assert sum(counts(joined, Kind.REQUESTS, Kind.ALIKE_REQUESTS)) == 5
            assert sum(counts(joined, Kind.ANSWERS, Kind.ALIKE_ANSWERS)) == 5
            assert not joined.requests.in_flight

    run(models, test)


def test_those_of_another_shape_keep_their_place_among_the_others(models: Path) -> None:
    async def test(joined: Joined) -> None:
        widths = [2, 2, 3, 2, 3, 3, 4]
        for _ in range(3):
            joined.sent.clear()
            asked = [joined.start("echo", np.full((1, width), width, np.float32)) for width in widths]
            for width, (_, answered) in zip(widths, asked, strict=True):
                answer = await answered
                assert isinstance(answer, InferResponse)
                assert np.asarray(answer.outputs["y"]).tolist() == [[width] * width]
        assert counts(joined, Kind.ALIKE_REQUESTS) == [2, 1, 1, 2, 1]

    run(models, test)


def test_a_request_that_says_more_is_described_whatever_came_before(models: Path) -> None:
    async def test(joined: Joined) -> None:
        zeros = np.zeros((1, 2), np.float32)
        for _ in range(3):
            await joined.start("echo", zeros)[1]
        joined.sent.clear()
        _, answered = joined.start("echo", zeros, parameters={"a": 1})
        assert isinstance(await answered, InferResponse)
        assert counts(joined, Kind.REQUESTS) == [1]
        assert counts(joined, Kind.ALIKE_REQUESTS) == []

    run(models, test)


def test_what_has_changed_since_is_checked_again_and_refused_by_the_id_of_each(models: Path) -> None:
    """The versions are others by now, of which the frontend process has not heard yet."""

    async def test(joined: Joined) -> None:
        def ask() -> list[asyncio.Future[Answer]]:
            return [joined.start("echo", np.zeros((3, 2), np.float32), f"id {number}")[1] for number in range(3)]

        for _ in range(2):
            for answered in ask():
                assert isinstance(await answered, InferResponse)
        small = json.dumps({"max_batch_size": 2, "backend": "identity", "input": X, "output": Y})
        await joined.server.engine.load("echo", {"config": small})
        for number, answered in enumerate(ask()):
            refused = await answered
            assert isinstance(refused, InvalidArgument)
            assert refused.message == (
                f"[request id: id {number}] inference request batch-size must be <= 2 for 'echo'"
            )
        joined.tell()
        with pytest.raises(InvalidArgument, match="batch-size must be <= 2"):
            ask()
        large = json.dumps({"max_batch_size": 3, "backend": "identity", "input": X, "output": Y})
        await joined.server.engine.load("echo", {"config": large})
        joined.tell()
        for answered in ask():
            assert isinstance(await answered, InferResponse)
        await joined.server.engine.unload("echo")
        for answered in ask():
            refused = await answered
            assert isinstance(refused, NotFound | Unavailable)
            assert "echo" in refused.message
        assert not joined.requests.in_flight

    run(models, test, model_control_mode="explicit", load_model=("echo",))


def test_a_number_that_is_anothers_by_now_says_nothing_of_it(models: Path) -> None:
    async def test(joined: Joined) -> None:
        for rows in (1, 3, 2):
            joined.requests.layouts.forget()
            tensor = np.full((rows, 2), rows, np.float32)
            for _ in range(3):
                answer = await joined.start("echo", tensor)[1]
                assert isinstance(answer, InferResponse)
                assert np.array_equal(np.asarray(answer.outputs["y"]), tensor)
        assert joined.requests.layouts.known
        joined.tell()
        assert not joined.requests.layouts.known  # of versions that may have gone

    run(models, test)


def test_loads_and_unloads_under_load_lose_nobody(models: Path) -> None:
    async def test(joined: Joined) -> None:
        engine = joined.server.engine
        sums: list[float] = []
        asked: list[tuple[float, asyncio.Future[Answer]]] = []

        async def change() -> None:
            for number in range(6):
                await (engine.unload("echo") if number % 2 else engine.load("echo"))
                joined.tell()

        changing = asyncio.ensure_future(change())
        while not changing.done():
            for number in range(4):
                value = float(len(asked))
                with contextlib.suppress(NotFound, Unavailable):  # here, where it is known already
                    row = np.full((1, 2 + number % 2), value, np.float32)
                    asked.append((value, joined.start("echo", row)[1]))
            await asyncio.sleep(0)
        await changing
        for value, answered in asked:
            answer = await answered
            if isinstance(answer, InferResponse):
                assert set(np.asarray(answer.outputs["y"]).ravel().tolist()) == {value}
                sums.append(value)
            else:
                assert isinstance(answer, NotFound | Unavailable)
        assert sums
        assert not joined.requests.in_flight

    run(models, test, model_control_mode="explicit", load_model=("echo",))


def test_what_a_frontend_reads_of_a_model_is_the_same_there(models: Path) -> None:
    async def test(joined: Joined) -> None:
        for name in CONFIGS:
            ours, theirs = joined.remote.resolve(name, "1"), joined.server.engine.resolve(name)
            for field in ("name", "version", "platform", "max_batch_size", "decoupled", "config", "inputs", "outputs"):
                assert getattr(ours, field) == getattr(theirs, field), field
            assert ours.labels == {name: list(lines) for name, lines in theirs.labels.items()}
            assert ours.metadata == theirs.metadata
        assert joined.remote.resolve("echo").labels == {"y": ["ant", "bee"]}

    run(models, test)


def test_a_reshape_is_done_once(models: Path) -> None:
    async def test(joined: Joined) -> None:
        _, answered = joined.start("reshaped", np.arange(4, dtype=np.float32))
        answer = await answered
        assert isinstance(answer, InferResponse)
        assert np.asarray(answer.outputs["y"]).tolist() == [0, 1, 2, 3]

    run(models, test)


@pytest.mark.parametrize(
    "tensor",
    [np.zeros((1, 2), np.int32), np.zeros((5, 2), np.float32), Undecoded("FP32", (1, 2), memoryview(b"abc"))],
    ids=["data type", "rows", "bytes"],
)
def test_what_does_not_fit_is_refused_before_it_travels_and_in_the_same_words(
    models: Path, tensor: Tensor | Undecoded
) -> None:
    async def test(joined: Joined) -> None:
        with pytest.raises(InvalidArgument) as refused:
            joined.start("echo", tensor)
        with pytest.raises(InvalidArgument) as wanted:
            joined.server.submit(Ticket(InferRequest("echo", {"x": tensor}), lambda answer, final: None))
        assert refused.value.message == wanted.value.message
        await asyncio.sleep(0)
        assert joined.sent == []

    run(models, test)


def test_what_is_not_there_is_not_found_in_the_same_words(models: Path) -> None:
    async def test(joined: Joined) -> None:
        for name, version in (("nobody", ""), ("echo", "7"), ("echo", "x")):
            with pytest.raises((NotFound, InvalidArgument)) as refused:
                joined.remote.resolve(name, version)
            with pytest.raises((NotFound, InvalidArgument)) as wanted:
                joined.server.engine.resolve(name, version)
            assert refused.value.message == wanted.value.message
            assert not joined.remote.finds(name, version)
        joined.remote.change("echo", (), ())
        assert not joined.remote.finds("echo", "")

    run(models, test)


def test_a_model_that_has_gone_meanwhile_is_refused_by_the_engine(models: Path) -> None:
    async def test(joined: Joined) -> None:
        joined.remote.change("gone", (1,), [write_view(joined.server.engine.resolve("echo"))])
        view = joined.remote.resolve("gone")
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            InferRequest("gone", {"x": np.zeros((1, 2), np.float32)}),
            lambda answer, final: answered.set_result(answer),
        )
        joined.remote.entrance().start(view, ticket)
        answer = await answered
        assert isinstance(answer, NotFound)
        assert answer.message == "Request for unknown model: 'gone' is not found"

    run(models, test)


def test_who_leaves_before_or_after_it_was_sent_is_told_and_answered(models: Path) -> None:
    async def test(joined: Joined) -> None:
        before, left = joined.start("echo", np.zeros((1, 2), np.float32))
        before.cancel()
        assert isinstance(await left, HeadraceError | InferResponse)
        assert (Kind.CANCEL, 1) in joined.sent
        assert joined.sent.index((Kind.REQUESTS, 1)) < joined.sent.index((Kind.CANCEL, 1))
        assert not joined.requests.in_flight

    run(models, test)


def test_large_strings_are_counted_and_refused_in_the_same_words(models: Path) -> None:
    async def test(joined: Joined) -> None:
        many = BytesTensor.from_items([b"x" * 100] * 2000, (2000,))
        _, answered = joined.start("strings", many)
        answer = await answered
        assert isinstance(answer, InferResponse)
        assert answer.outputs["y"].shape == (2000,)
        few = Ticket(
            InferRequest("strings", {"x": many.reshape((1999,))}), lambda answer, final: refused.append(answer)
        )
        refused: list[Answer] = []
        joined.requests.submit(few)  # as if nobody had checked it here
        while not refused:
            await asyncio.sleep(0)
        assert isinstance(refused[0], InvalidArgument)
        assert "unexpected number of string elements 2000" in refused[0].message

    run(models, test)


def test_a_deadline_travels(models: Path) -> None:
    encoder, decoder = Encoder(None, names_models=True), Decoder(None, _nothing)
    request = InferRequest("echo", {"x": np.zeros(1, np.float32)}, parameters={"a": 1})
    deadline_ns = monotonic_ns() + 10**9
    request.expire_at(deadline_ns)
    (frame,) = FrameParser().feed(encoder.requests([(1, Ticket(request, lambda answer, final: None))]))
    (arrived,) = decoder.requests(frame)
    assert (arrived.deadline_ns, arrived.parameters, arrived.model_name) == (deadline_ns, {"a": 1}, "echo")


def test_more_than_the_peer_believes_are_refused_here(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.remote_engine.MOST_REQUESTS", 3)

    async def test(joined: Joined) -> None:
        asked = [joined.start("echo", np.zeros((1, 2), np.float32)) for _ in range(3)]
        with pytest.raises(Unavailable, match="3 requests of one frontend process are not answered yet"):
            joined.start("echo", np.zeros((1, 2), np.float32))
        for _, answered in asked:
            assert isinstance(await answered, InferResponse)

    run(models, test)
