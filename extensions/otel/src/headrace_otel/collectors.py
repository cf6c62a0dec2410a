"""Sends one message to a collector, over HTTP/1.1 or gRPC. Blocks, so it is for a separate thread.

Source: https://opentelemetry.io/docs/specs/otlp/. Reads only a limited part of the answer.
"""

from __future__ import annotations

import gzip
import http.client
import socket
import ssl
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event, Timer
from time import time
from typing import Any, Final, Protocol

from headrace import ConfigError
from headrace_otel.otel_options import CollectorAddress

#: The largest answer of a collector. The answer to an export has a few bytes.
MAX_ANSWER_BYTES: Final = 64 * 1024
#: The maximum pause that a collector may request.
LONGEST_PAUSE_S: Final = 300.0
#: Answers after which the same message may be sent again.
_REPEATABLE = frozenset((429, 502, 503, 504))
_REPEATABLE_CODES = frozenset(
    ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS", "RESOURCE_EXHAUSTED")
)


class NotTaken(Exception):
    """A collector has refused a message. ``pause_s`` is its Retry-After, or 0."""

    def __init__(self, reason: str, is_repeatable: bool, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_repeatable, self.pause_s = is_repeatable, pause_s


class Collector(Protocol):
    """One connection, for one thread."""

    def send(self, signal: str, message: bytes) -> bytes:
        """Send ``message`` of ``signal``, "metrics" or "logs". Return the answer. Raises `NotTaken`."""

    def close(self) -> None: ...


def connect(target: CollectorAddress) -> Collector:
    """Return a collector at ``target``, without connecting yet. Raises `ConfigError`."""
    if target.certificate:
        try:
            ssl.create_default_context(cafile=target.certificate)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_CERTIFICATE={target.certificate} can not be read: {error}"
            ) from error
    if target.protocol == "http/protobuf":
        return HttpCollector(target)
    try:
        return GrpcCollector(target)
    except ImportError as error:
        raise ConfigError(f"--otel-protocol=grpc needs headrace-otel[grpc]: {error}") from error


class HttpCollector:
    """Posts each message, compressed, on a connection that stays open."""

    def __init__(self, target: CollectorAddress) -> None:
        self._target = target
        self._connection: http.client.HTTPConnection | None = None
        self._headers = {
            **target.headers, "content-type": "application/x-protobuf", "content-encoding": "gzip",
            "accept-encoding": "identity",
        }  # fmt: skip

    def send(self, signal: str, message: bytes) -> bytes:
        try:
            return self._send_in_time(f"{self._target.path}/v1/{signal}", gzip.compress(message, 1))
        except NotTaken as refusal:
            if not refusal.is_repeatable:
                self.close()
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise NotTaken(f"{type(error).__name__}: {error}", is_repeatable=True) from None

    def close(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
            self._connection = None

    def _send_in_time(self, path: str, body: bytes) -> bytes:
        """Send ``body``. The socket has a time-out for each read; a timer ends the whole exchange after that time."""
        connection, is_late = self._connection or self._connect(), Event()
        self._connection = connection
        timer = Timer(self._target.timeout_s, _cut, (connection, is_late))
        timer.daemon = True
        timer.start()
        try:
            return self._send(connection, path, body, is_late)
        except (OSError, http.client.HTTPException):
            if is_late.is_set():
                raise TimeoutError("the answer takes too long") from None
            raise
        finally:
            timer.cancel()

    def _send(self, connection: http.client.HTTPConnection, path: str, body: bytes, is_late: Event) -> bytes:
        try:
            connection.request("POST", path, body, self._headers)
            answer = connection.getresponse()
        except ConnectionError:  # it has closed an idle connection
            if is_late.is_set():
                raise
            connection.close()
            connection.request("POST", path, body, self._headers)
            answer = connection.getresponse()
        data = b""
        while chunk := answer.read1(MAX_ANSWER_BYTES):
            data += chunk
            if len(data) > MAX_ANSWER_BYTES:
                raise NotTaken(f"it answers {answer.status} with more than {MAX_ANSWER_BYTES} bytes", False)
        if is_late.is_set():  # what was read may be a part
            raise TimeoutError("the answer takes too long")
        answer.close()  # otherwise the connection could not be used again
        if answer.status == 200:
            return data
        words = f"it answers {answer.status} {answer.reason[:80]}"
        raise NotTaken(words, answer.status in _REPEATABLE, _pause_s(answer.headers.get("retry-after", "")))

    def _connect(self) -> http.client.HTTPConnection:
        target = self._target
        if not target.is_secure:
            return http.client.HTTPConnection(target.host, target.port, timeout=target.timeout_s)
        context = ssl.create_default_context(cafile=target.certificate or None)
        return http.client.HTTPSConnection(target.host, target.port, timeout=target.timeout_s, context=context)


def _cut(connection: http.client.HTTPConnection, is_late: Event) -> None:
    """Set ``is_late``, and end a read or a write that waits on ``connection``, from another thread."""
    is_late.set()
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _pause_s(retry_after: str) -> float:
    """Return the pause of a ``Retry-After``, in seconds or as a date; 0 if it is none."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), LONGEST_PAUSE_S)
    try:
        return min(max(parsedate_to_datetime(text).timestamp() - time(), 0.0), LONGEST_PAUSE_S)
    except (ValueError, TypeError, OverflowError):
        return 0.0


class GrpcCollector:
    """Calls the method ``Export`` of each signal's service."""

    def __init__(self, target: CollectorAddress) -> None:
        import grpc

        self._error = grpc.RpcError
        self._target = target
        where = f"{target.host}:{target.port}"
        options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES), ("grpc.enable_retries", 0)]
        if target.is_secure:
            roots = Path(target.certificate).read_bytes() if target.certificate else None
            self._channel = grpc.secure_channel(where, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.insecure_channel(where, options)
        self._compression = grpc.Compression.Gzip
        self._metadata = tuple(target.headers.items())
        self._methods: dict[str, Any] = {}

    def send(self, signal: str, message: bytes) -> bytes:
        method = self._methods.get(signal)
        if method is None:
            name = f"/opentelemetry.proto.collector.{signal}.v1.{signal.capitalize()}Service/Export"
            method = self._methods[signal] = self._channel.unary_unary(name, None, None)
        try:
            answer: bytes = method(
                message, timeout=self._target.timeout_s, metadata=self._metadata, compression=self._compression
            )
        except self._error as error:
            code = getattr(error, "code", lambda: None)()
            name = getattr(code, "name", "UNKNOWN")
            details = str(getattr(error, "details", lambda: "")() or "")[:200]
            raise NotTaken(f"{name}: {details}", name in _REPEATABLE_CODES) from None
        return answer

    def close(self) -> None:
        self._channel.close()
