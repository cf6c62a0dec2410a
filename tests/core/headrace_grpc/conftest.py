"""A peer that speaks HTTP/2 frame by frame and keeps no rules, and a server process for it to speak to.

Frames are made by ``hyperframe`` and header blocks by ``hpack``, so that nothing of Headrace's judges
itself. Whatever is no frame can be sent as bytes.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import hpack
import pytest
from hyperframe import frame as frames
from tritonclient.grpc import service_pb2 as triton

from headrace_grpc.frontend import GrpcFrontend
from headrace_grpc.hosts import GrpcHost

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService"
Headers: TypeAlias = "Iterable[tuple[str | bytes, str | bytes]]"
F = TypeVar("F", bound=frames.Frame)


@dataclass
class Answer:
    """The answer on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    #: The code of the RST_STREAM that ended it, if one did.
    reset: int | None = None
    ended: bool = False

    @property
    def status(self) -> int:
        return int(self.trailers["grpc-status"])

    @property
    def messages(self) -> list[tuple[int, bytes]]:
        """Return the flag and the content of each message; an incomplete one fails."""
        found, rest = [], self.data
        while rest:
            flag, size = struct.unpack(">BI", rest[:5])
            assert len(rest) >= 5 + size, "a message is cut short"
            found.append((flag, rest[5 : 5 + size]))
            rest = rest[5 + size :]
        return found

    @property
    def message(self) -> bytes:
        """The one message of a call that went well."""
        assert (self.reset, self.trailers.get("grpc-status")) == (None, "0"), self
        ((flag, content),) = self.messages
        assert flag == 0
        return content


class Closed(Exception):
    """The server closed the connection."""


class Peer:
    """A client connection to ``port``. Reading stores the frames of each stream."""

    def __init__(
        self,
        port: int,
        settings: Mapping[int, int] | None = None,
        *,
        start: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._decoder.max_header_list_size = 1 << 20
        self._received = b""
        self._unacknowledged = 0
        self.was_reset = False
        self._block: tuple[int, int, bytes] | None = None
        self.answers: dict[int, Answer] = {}
        #: Every received frame, in order.
        self.seen: list[frames.Frame] = []
        #: True if read bytes are credited at once, and True if settings are acknowledged.
        self.credits, self.acknowledges = True, start
        if start:
            self.send(PREFACE, frames.SettingsFrame(settings=dict(settings or {})))

    def close(self) -> None:
        self.socket.close()

    # ------------------------------------------------------------------- making

    @staticmethod
    def data(stream: int, content: bytes, *flags: str, **rest: Any) -> frames.DataFrame:
        return frames.DataFrame(stream, content, flags=flags, **rest)

    @staticmethod
    def window(stream: int, increment: int) -> frames.WindowUpdateFrame:
        return frames.WindowUpdateFrame(stream, increment)

    @staticmethod
    def framed(message: bytes, packed: int = 0) -> bytes:
        """``message`` behind gRPC's prefix."""
        return bytes([packed]) + struct.pack(">I", len(message)) + message

    @staticmethod
    def fields(method: str = "ServerLive", *more: tuple[str, str], **pseudo: str) -> list[tuple[str, str]]:
        """The headers of a call. ``_method``, ``_path`` and ``_scheme`` replace; an empty one is left out."""
        path = method if method.startswith("/") else f"{SERVICE}/{method}"
        first = {"_method": "POST", "_scheme": "http", "_path": path, "_authority": "test", **pseudo}
        pseudo_headers = [(f":{name[1:]}", value) for name, value in first.items() if value]
        return [*pseudo_headers, ("te", "trailers"), ("content-type", "application/grpc"), *more]

    @staticmethod
    def infer(model: str = "identity", content: bytes = bytes(4), id: str = "") -> bytes:
        """A serialized request for an identity of float32 whose data is ``content``."""
        request = triton.ModelInferRequest(model_name=model, id=id, raw_input_contents=[content])
        request.inputs.add(name="IN", datatype="FP32", shape=[1, len(content) // 4])
        body: bytes = request.SerializeToString()
        return body

    # ------------------------------------------------------------------ sending

    def send(self, *what: frames.Frame | bytes) -> Peer:
        """Write frames or bytes at once. If the server has closed, they are lost without an error."""
        self._unacknowledged += sum(isinstance(each, frames.SettingsFrame) and not each.flags for each in what)
        try:
            self.socket.sendall(b"".join(each if isinstance(each, bytes) else each.serialize() for each in what))
        except ConnectionError:
            self.was_reset = True
        return self

    def block(self, headers: Headers) -> bytes:
        """A header block; call in the order of sending."""
        return self.encoder.encode(list(headers), huffman=False)

    def headers(self, stream: int, headers: Headers | None = None, *flags: str, **rest: Any) -> frames.HeadersFrame:
        """Return HEADERS, whole by default: END_HEADERS is set, END_STREAM is not."""
        found = frames.HeadersFrame(stream, self.block(self.fields() if headers is None else headers), **rest)
        found.flags |= {"END_HEADERS", *flags}
        return found

    def start(self, stream: int, method: str = "ServerLive", *more: tuple[str, str], **pseudo: str) -> Peer:
        """Send the headers of a call."""
        return self.send(self.headers(stream, self.fields(method, *more, **pseudo)))

    def call(
        self, stream: int, method: str = "ServerLive", message: bytes = b"", *more: tuple[str, str], packed: int = 0
    ) -> None:
        """Send a whole call, regardless of windows."""
        content = self.framed(message, packed)
        pieces = [self.data(stream, content[at : at + 16384]) for at in range(0, len(content), 16384)]
        pieces[-1].flags.add("END_STREAM")
        self.send(self.headers(stream, self.fields(method, *more)), *pieces)

    # ---------------------------------------------------------------- receiving

    def read(self) -> frames.Frame:
        """The next frame. Raises `Closed` at the end."""
        while len(self._received) < 9:
            self._receive()
        found, size = frames.Frame.parse_frame_header(memoryview(self._received[:9]))
        while len(self._received) < 9 + size:
            self._receive()
        found.parse_body(memoryview(self._received[9 : 9 + size]))
        self._received = self._received[9 + size :]
        self.seen.append(found)
        self._note(found, size)
        return found

    def until(self, kind: type[F], stream: int | None = None) -> F:
        """The next frame of ``kind``, on ``stream`` if given."""
        while True:
            found = self.read()
            if isinstance(found, kind) and stream in (None, found.stream_id):
                return found

    def answer(self, stream: int) -> Answer:
        """Once the stream has ended, one way or the other."""
        while stream not in self.answers or not self.answers[stream].ended:
            self.read()
        return self.answers[stream]

    def ask(self, stream: int, method: str = "ServerLive", message: bytes = b"", *more: tuple[str, str]) -> Answer:
        self.call(stream, method, message, *more)
        return self.answer(stream)

    def goaway(self) -> int:
        """The code with which the server ends the connection, which it then closes."""
        try:
            code = self.until(frames.GoAwayFrame).error_code
        except Closed:
            raise AssertionError(f"closed without GOAWAY after {self.seen[-3:]}") from None
        self.wait_until_closed()
        return code

    def wait_until_closed(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                self.read()

    def listen(self, seconds: float) -> None:
        """Read frames for ``seconds``. Return sooner if the server closes the connection."""
        end = time.monotonic() + seconds
        with contextlib.suppress(Closed):
            while (left := end - time.monotonic()) > 0 and select.select([self.socket], [], [], left)[0]:
                self.read()

    def settle(self) -> None:
        """Return when the server has read everything that was sent: it has then acknowledged settings.

        Twice, because its immediate answers may follow the first acknowledgement.
        """
        for _ in range(2):
            self.send(frames.SettingsFrame())
            while self._unacknowledged:
                self.read()

    def _receive(self) -> None:
        try:
            some = self.socket.recv(1 << 16)
        except ConnectionError:
            some, self.was_reset = b"", True
        if not some:
            raise Closed
        self._received += some

    def _note(self, found: frames.Frame, size: int) -> None:
        answer = self.answers.setdefault(found.stream_id, Answer()) if found.stream_id else Answer()
        if isinstance(found, frames.HeadersFrame):
            self._block = (found.stream_id, "END_STREAM" in found.flags, found.data)
        elif isinstance(found, frames.ContinuationFrame):
            assert self._block is not None
            self._block = (*self._block[:2], self._block[2] + found.data)
        elif isinstance(found, frames.DataFrame):
            answer.data += found.data
            if self.credits and size:
                self.send(self.window(0, size), self.window(found.stream_id, size))
        elif isinstance(found, frames.RstStreamFrame):
            answer.reset = found.error_code
        elif isinstance(found, frames.SettingsFrame):
            if "ACK" in found.flags:
                self._unacknowledged -= 1
            elif self.acknowledges:
                self.send(frames.SettingsFrame(flags=["ACK"]))
        if "END_HEADERS" in found.flags and self._block is not None:
            _, ended, block = self._block
            self._block = None
            fields = {_text(name): _text(value) for name, value in self._decoder.decode(block)}
            target = answer.trailers if answer.headers or "grpc-status" in fields else answer.headers
            target.update(fields)
            answer.ended = answer.ended or bool(ended)
        answer.ended = answer.ended or "END_STREAM" in found.flags or answer.reset is not None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


# ------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="session")
def host() -> type[GrpcHost]:
    """The gRPC host of a test. Tests with this fixture also run on the hosts of plugins."""
    return GrpcFrontend


_IO = """
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "{}" data_type: TYPE_FP32 dims: [ -1 ] }}
"""

MODELS = {
    "identity": 'backend: "identity" max_batch_size: 4' + _IO.format("OUT"),
    "slow": 'backend: "gated" max_batch_size: 4' + _IO.format("OUT"),
}


@pytest.fixture(scope="session")
def grpc_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `MODELS`: IN is answered as OUT, by ``slow`` while its gate is open."""
    root = tmp_path_factory.mktemp("grpc_models")
    for name, config in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="session")
def grpc_gate(grpc_models: Path, make_gate: Callable[[Path], Gate]) -> Gate:
    return make_gate(grpc_models / "slow" / "1")


@pytest.fixture
def gate(grpc_gate: Gate) -> Iterator[Gate]:
    """The gate of ``slow``, closed; open again after the test."""
    grpc_gate.close()
    yield grpc_gate
    grpc_gate.open()


@pytest.fixture(scope="session")
def native(
    keep_serving: Callable[..., Headrace], grpc_models: Path, grpc_gate: Gate, gated_environ: Mapping[str, str]
) -> Headrace:
    """A server as it is by default, whose gRPC endpoint is the native one."""
    return keep_serving(f"--model-repository={grpc_models}", environ=gated_environ)


@pytest.fixture
def serve_native(
    serve: Callable[..., Headrace], grpc_models: Path, grpc_gate: Gate, gated_environ: Mapping[str, str]
) -> Callable[..., Headrace]:
    """Starts a server with further flags."""
    return lambda *words: serve(f"--model-repository={grpc_models}", *words, environ=gated_environ)


@pytest.fixture
def connect() -> Iterator[Callable[..., Peer]]:
    """Opens connections that are closed after the test."""
    with contextlib.ExitStack() as opened:

        def connect(port: int, *words: Any, **how: Any) -> Peer:
            peer = Peer(port, *words, **how)
            opened.callback(peer.close)
            return peer

        yield connect


@pytest.fixture
def peer(native: Headrace, connect: Callable[..., Peer]) -> Peer:
    """A connection to ``native`` on which the settings have been exchanged."""
    found = connect(native.grpc)
    found.settle()
    return found


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, in cert.pem, and its key, in key.pem. It has a second common name."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates of this test, and is not installed")
    folder = tmp_path_factory.mktemp("pem")
    subject = ["-subj", "/CN=localhost/O=x/CN=other", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return folder
