"""Memory of clients in a model process: tensors in it are not copied, and nothing else of it can be reached."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import pytest

from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest
from headrace_processes.ipc.framing import Frame, FrameParser, ProtocolError
from headrace_processes.ipc.mappings import ReceivedMappings, SentMappings, with_placed_outputs
from headrace_processes.ipc.replies import reply_of
from headrace_processes.ipc.shared_mapping import SharedMapping, mapping_of
from headrace_processes.ipc.tensors import INLINE, Placed

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="client shared memory needs Linux")

SIZE = 4 * INLINE
#: A tensor in a message: header length, place, bytes, offset.
TENSOR = Struct("<HBQQ")


class Client(SharedMapping):
    """Memory of a client: a file without a name."""

    def __init__(self, size: int = SIZE) -> None:
        self.file = os.memfd_create("client")
        os.ftruncate(self.file, size)
        super().__init__(self.file, 0, size)

    def reopen(self) -> int:
        return os.dup(self.file)


class Ends:
    """The server's side, and that of a model process, in one process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.forgotten: list[int] = []
        self.socket = ours
        self.sent, self.received = SentMappings(ours, self.forgotten.append), ReceivedMappings(theirs.detach())
        self.encoder, self.decoder = Encoder(None, self.sent), Decoder(None, self._free)
        self.child = Decoder(None, self._free, self.received)

    def request(self, request: InferRequest) -> tuple[bytes, ReceivedRequest]:
        message = self.encoder.requests([(1, Ticket(request, _reply))])
        (received,) = self.child.requests(framed(message))
        return message, received

    @staticmethod
    def _free(offset: int) -> None:
        raise AssertionError("there is no arena")


def _reply(answer: Any, final: bool) -> None:
    raise AssertionError("no answer is expected")


def framed(message: bytes) -> Frame:
    (frame,) = FrameParser().feed(message)
    return frame


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.socket.close()
    made.received._socket.close()


def tensor_in(client: Client, offset: int, count: int) -> Any:
    return np.frombuffer(client.memory[offset : offset + 4 * count].toreadonly(), np.float32).reshape(1, count)


def test_an_input_is_the_memory_of_the_client_itself(ends: Ends) -> None:
    client = Client()
    np.asarray(client).view(np.float32)[:] = np.arange(SIZE // 4)
    message, received = ends.request(InferRequest("m", {"x": tensor_in(client, INLINE, INLINE // 4)}))
    assert len(message) < 200
    tensor: Any = received.inputs["x"]
    assert tensor.tolist() == [[*range(INLINE // 4, INLINE // 2)]]
    np.asarray(client).view(np.float32)[INLINE // 4] = 7
    assert tensor[0, 0] == 7, "no copy was made"
    again, received = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
    assert (len(again), received.inputs["x"][0, 1]) == (len(message), 1)  # type: ignore[index]


def test_small_and_scattered_tensors_are_copied(ends: Ends) -> None:
    client = Client()
    small = tensor_in(client, 0, 16)
    scattered = np.asarray(client).view(np.float32).reshape(-1, 2)[:, :1]
    elsewhere = np.zeros((1, INLINE), np.uint8)
    message, received = ends.request(InferRequest("m", {"a": small, "b": scattered, "c": elsewhere}))
    assert len(message) > scattered.nbytes + elsewhere.nbytes
    np.asarray(client)[:] = 1
    inputs: Any = received.inputs
    assert not any(np.any(value) for value in inputs.values())


def test_an_output_is_written_to_the_memory_of_the_client(ends: Ends) -> None:
    client = Client()
    target = client.memory[INLINE : 3 * INLINE]
    request = LocatedRequest.of(InferRequest("m", {}), {"y": target, "small": client.memory[:64]}, None)
    _, received = ends.request(request)
    assert received.targets is not None
    assert list(received.targets) == ["y"]
    output = np.arange(INLINE // 4, dtype=np.float32)
    response = with_placed_outputs(InferResponse({"y": output, "other": np.ones(3)}, {}, "", ""), received.targets)
    message = Encoder(None).answers([reply_of(1, response, True)])
    assert len(message) < 200
    (reply,) = ends.decoder.answers(framed(message), {1: Ticket(request, _reply)})
    assert isinstance(reply.answer, InferResponse)
    found: Any = reply.answer.outputs["y"]
    assert found.tolist() == output.tolist()
    assert mapping_of(found) == (client, INLINE)
    assert reply.answer.outputs["other"].tolist() == [1, 1, 1]  # type: ignore[union-attr]


def test_an_output_that_does_not_fit_or_is_small_is_sent(ends: Ends) -> None:
    client = Client()
    targets = {"y": np.asarray(client)[:INLINE]}
    for size in (INLINE // 2, INLINE + 4):
        response = with_placed_outputs(InferResponse({"y": np.ones(size, np.uint8)}, {}, "", ""), targets)
        assert type(response.outputs["y"]) is np.ndarray
    assert not np.any(np.asarray(client))


def test_a_process_cannot_claim_memory_that_its_request_does_not_have(ends: Ends) -> None:
    client = Client()
    request = LocatedRequest.of(InferRequest("m", {}), {"y": client.memory[:INLINE]}, None)
    placed: Any = {"y": Placed(np.ones(INLINE, np.uint8))}
    tickets = {1: Ticket(request, _reply), 2: Ticket(InferRequest("m", {}), _reply)}

    def answer(call: int, outputs: Any) -> list[Any]:
        message = Encoder(None).answers([reply_of(call, InferResponse(outputs, {}, "", ""), True)])
        return ends.decoder.answers(framed(message), tickets)

    assert answer(1, placed)
    for call, outputs in (
        (2, placed),
        (3, placed),
        (1, {"z": placed["y"]}),
        (1, {"y": Placed(np.ones(INLINE + 1, np.uint8))}),
    ):
        with pytest.raises(ProtocolError):
            answer(call, outputs)


def test_offsets_outside_of_a_mapping_are_refused(ends: Ends) -> None:
    client = Client()
    message, _ = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
    place = message.index(TENSOR.pack(2 + 16 + 1, 2, INLINE, 0))
    for offset in (SIZE - INLINE + 1, SIZE, 2**63, 2**64 - 1):
        changed = bytearray(message)
        TENSOR.pack_into(changed, place, 2 + 16 + 1, 2, INLINE, offset)
        with pytest.raises(ProtocolError):
            ends.child.requests(framed(bytes(changed)))
    with pytest.raises(ProtocolError, match="no memory 2"):
        ends.decoder.requests(framed(message))


def test_a_mapping_is_released_when_the_client_unregisters_it(ends: Ends) -> None:
    client = Client()
    file = os.fstat(client.file).st_ino
    message, received = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
    assert _times_mapped(file) == 2
    descriptors = [each for each in Path("/proc/self/fd").iterdir() if each.exists() and each.stat().st_ino == file]
    assert descriptors == [Path(f"/proc/self/fd/{client.file}")], "none is kept"
    os.close(client.file)
    del client
    gc.collect()
    assert ends.forgotten == [1]
    ends.received.release(ends.forgotten)
    assert _times_mapped(file) == 1, "the request in the process still has it"
    del received
    gc.collect()
    assert _times_mapped(file) == 0
    with pytest.raises(ProtocolError, match="was released"):
        ends.child.requests(framed(message))


def _times_mapped(inode: int) -> int:
    return sum(f" {inode} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_mapping_whose_file_cannot_be_opened_again_is_copied(ends: Ends) -> None:
    client = Client()
    client.__class__ = Closed
    for _ in range(2):
        message, received = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
        assert len(message) > INLINE
        assert mapping_of(received.inputs["x"]) is None  # type: ignore[arg-type]
    assert Closed.attempts == 1


class Closed(Client):
    attempts = 0

    def reopen(self) -> int:
        Closed.attempts += 1
        return SharedMapping.reopen(self)


def test_descriptors_that_the_process_has_not_received_do_not_block_the_server(ends: Ends) -> None:
    clients = [Client() for _ in range(2000)]
    sent = [ends.sent.place(each.memory) is not None for each in clients]
    for each in clients:
        os.close(each.file)
    assert sent[:3] == [True, True, True]
    assert False in sent, "the others are copied"


def test_a_file_that_shrinks_reads_as_zeros_and_is_reported(ends: Ends) -> None:
    client, late, small = Client(), Client(), Client(4096)
    np.asarray(client)[:] = 1
    np.asarray(late)[:] = 1
    _, received = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
    assert ends.received.take_lost() == []
    message = ends.encoder.requests([(2, Ticket(InferRequest("m", {"x": tensor_in(late, 0, INLINE // 4)}), _reply))])
    os.ftruncate(client.file, 0)
    os.ftruncate(late.file, 0)
    assert not np.any(received.inputs["x"])  # type: ignore[arg-type]
    _, received = ends.request(InferRequest("m", {"x": tensor_in(client, 0, INLINE // 4)}))
    assert not np.any(received.inputs["x"])  # type: ignore[arg-type]
    (received,) = ends.child.requests(framed(message))
    assert not np.any(received.inputs["x"])  # type: ignore[arg-type]
    assert ends.received.take_lost() == [1, 2]
    assert ends.received.take_lost() == []
    assert (client.is_lost, late.is_lost, small.is_lost) == (False, False, False)
    ends.sent.mark_lost([1, 2, 3, 77])
    assert (client.is_lost, late.is_lost, small.is_lost) == (True, True, False)


def test_requests_with_the_same_targets_have_parameters_of_their_own(ends: Ends) -> None:
    client = Client()
    targets = {"y": client.memory[:INLINE]}
    for parameters in ({}, {}, {"a": 1}, {}, {"a": 2}):
        request = LocatedRequest.of(InferRequest("m", {}, parameters=parameters), targets, None)
        _, received = ends.request(request)
        assert received.parameters == parameters
        assert received.targets is not None
        assert mapping_of(received.targets["y"]) is not None
        received.parameters["later"] = 1  # type: ignore[index]  # as a careless model would
