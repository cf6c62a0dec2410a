"""Messages with tensors in device memory: they arrive unchanged, and malformed ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import InferResponse
from headrace_processes.ipc.device_codec import ON_BOTH, ON_DEVICE, DeviceDecoder, DeviceEncoder, on_device_of
from headrace_processes.ipc.device_memory import ReceivedDeviceMemory, SentDeviceMemory
from headrace_processes.ipc.framing import Frame, FrameParser, ProtocolError
from headrace_processes.ipc.replies import reply_of
from headrace_processes.ipc.tensors import TENSOR, Placed
from tests.core.headrace_processes.played_cuda import UUID, PlayedCuda, on_gpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Sides:
    def __init__(self, folder: Path) -> None:
        self.cuda = PlayedCuda(folder)
        self.sent = SentDeviceMemory(self.cuda, (UUID,), lambda message: None)
        self.encoder = DeviceEncoder(None)
        other = PlayedCuda(folder)
        received = ReceivedDeviceMemory(lambda: other, "m_0_0", lambda message: None)
        self.decoder = DeviceDecoder(None, lambda offset: None, received)

    def staged(self, array: Any = X) -> Any:
        staged = self.sent.stage(on_gpu(array, self.cuda))
        assert staged is not None
        return staged

    def blocks(self) -> int:
        self.sent._collect()
        return sum(len(each.blocks._taken) for each in self.sent._segments.values())


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def parsed(message: bytes) -> Frame:
    (frame,) = FrameParser().feed(message)
    return frame


def test_inputs_and_requested_outputs_on_the_device(sides: Sides) -> None:
    inputs = {"a": sides.staged(), "b": X}
    request = LocatedRequest.of(InferRequest("m", inputs), {}, None, {"y": False, "z": True})
    (decoded,) = sides.decoder.requests(parsed(sides.encoder.request(1, request)))
    tensor: Any = decoded.inputs["a"]
    np.testing.assert_array_equal(tensor.to_host(), X)
    np.testing.assert_array_equal(decoded.inputs["b"], X)
    assert decoded.targets == {"y": ON_DEVICE, "z": ON_BOTH}
    assert on_device_of(decoded.targets) == {"y": False, "z": True}


def test_outputs_on_the_device(sides: Sides) -> None:
    outputs: Any = {"y": Placed(sides.staged()), "z": X}
    message = sides.encoder.answers([reply_of(3, InferResponse(outputs, {}, "", ""), True)])
    (reply,) = sides.decoder.answers(parsed(message))
    assert isinstance(reply.answer, InferResponse)
    found: Any = reply.answer.outputs
    np.testing.assert_array_equal(found["y"].to_host(), X)
    np.testing.assert_array_equal(found["z"], X)


def test_a_message_that_is_not_sent_holds_no_block(sides: Sides) -> None:
    with pytest.raises(ValueError, match=r"int too large|argument out of range|format requires"):
        sides.encoder.request(1, InferRequest("m", {"a": sides.staged()}, priority=1 << 70))
    with pytest.raises(ValueError, match="no counterpart"):
        sides.encoder.request(1, InferRequest("m", {"a": sides.staged(), "b": np.zeros(2, np.complex64)}))
    assert sides.blocks() == 0
    message = sides.encoder.request(1, InferRequest("m", {"a": sides.staged()}))
    assert sides.blocks() == 1
    assert message


def test_a_wrong_size_is_refused(sides: Sides) -> None:
    message = bytearray(sides.encoder.request(1, InferRequest("m", {"a": sides.staged()})))
    begin = message.index(TENSOR.pack(2 + 16 + 1, 4, X.nbytes, 0))
    TENSOR.pack_into(message, begin, 2 + 16 + 1, 4, X.nbytes + 1, 0)
    with pytest.raises(ProtocolError, match=r"25 bytes for FP32\[2, 3\] on a device"):
        sides.decoder.requests(parsed(bytes(message)))
    TENSOR.pack_into(message, begin, 2 + 16 + 1, 4, X.nbytes, 1 << 39)
    with pytest.raises(ProtocolError, match="are not in a segment"):
        sides.decoder.requests(parsed(bytes(message)))


def test_without_memory_of_clients_a_target_there_is_refused(sides: Sides) -> None:
    request = LocatedRequest.of(InferRequest("m", {"x": X}), {}, None, {"y": False})
    message = sides.encoder.request(1, request).replace(b'"y": [0, 0, 0]', b'"y": [1, 0, 0]')
    with pytest.raises(ProtocolError, match="there is no memory of clients"):
        sides.decoder.requests(parsed(message))
