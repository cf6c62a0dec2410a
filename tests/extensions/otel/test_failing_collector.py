"""Absent, hanging, refusing, pausing and flooding collectors: queues stay bounded, and drops are counted."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, SpanContext, use_span

from headrace import Code, ConfigError, FinishedInference, Server, ServerOptions
from headrace_otel import OtelOptions
from headrace_otel.access_records import AccessRecords
from headrace_otel.collectors import LONGEST_PAUSE_S, MAX_ANSWER_BYTES, NotTaken, connect
from headrace_otel.delivery import Delivery
from headrace_otel.log_lines import LogLines
from headrace_otel.log_messages import write_records
from headrace_otel.otel_options import CollectorAddress
from headrace_otel.record_queue import MAX_WAITING, RecordQueue
from headrace_otel.record_sender import RecordSender
from tests.extensions.otel.collector import Collector, collecting

MESSAGE = ExportLogsServiceRequest().SerializeToString()


@pytest.fixture
def own() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def address(url: str, protocol: str = "http/protobuf", timeout_s: float = 10.0) -> CollectorAddress:
    host, _, port = url.removeprefix("http://").partition(":")
    return CollectorAddress(protocol, host, int(port), "", False, {}, "", timeout_s)


@pytest.fixture
def sender(own: Collector) -> Iterator[Delivery]:
    found = delivery(address(own.http))
    yield found
    found.close()


def delivery(where: CollectorAddress) -> Delivery:
    return Delivery(connect(where), "logs", ExportLogsServiceResponse, "rejected_log_records")


def test_a_failure_and_its_end_are_logged_once(
    own: Collector, sender: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    own.status, own.body = 503, b"later"
    assert [sender.send(MESSAGE) for _ in range(3)] == [None] * 3
    own.status, own.body = 200, b""
    assert [sender.send(MESSAGE) for _ in range(3)] == [True] * 3
    assert caplog.messages == [
        "the collector of OpenTelemetry does not take logs: it answers 503 Service Unavailable",
        "the collector of OpenTelemetry takes logs again",
    ]
    assert (sender.sent, sender.failed, sender.not_before) == (3, 3, 0)


def test_a_record_of_core_has_a_response_unless_it_failed(own: Collector, sender: Delivery) -> None:
    done = FinishedInference(0, "http", "", "", "", "m", 1, "", 8, None, 8, 2_000, 0, None)
    queue = RecordQueue()
    for record in (tuple(done), tuple(done._replace(code=Code.UNAVAILABLE, response_bytes=0))):
        queue.add(record)
    records = RecordSender(queue, sender, Resource())
    records.end()
    records.join(10)
    found = [{each.key: each.value.int_value for each in r.attributes} for r in own.records("headrace.access")]
    assert [each["headrace.responses"] for each in found] == [1, 0]
    assert [each["headrace.duration_us"] for each in found] == [2, 2]


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [("7", 7, 7), ("99999999999", LONGEST_PAUSE_S, LONGEST_PAUSE_S), ("Fri, 31 Dec 2100 23:59:59 GMT", 300, 300),
     ("soon", 1, 1), ("-5", 1, 1), ("", 1, 1)],
)  # fmt: skip
def test_a_retry_after_of_the_collector_is_obeyed(
    own: Collector, sender: Delivery, retry_after: str, least: float, most: float
) -> None:
    own.status, own.headers = 429, {"Retry-After": retry_after}
    begun = monotonic()
    assert sender.send(MESSAGE) is None
    assert least <= sender.not_before - begun <= most + 5


@pytest.mark.parametrize("status", [400, 401, 302, 404, 500])
def test_other_answers_are_not_retried(own: Collector, sender: Delivery, status: int) -> None:
    own.status, own.headers = status, {"Location": own.http}
    assert sender.send(MESSAGE) is False


def test_an_answer_without_end_is_not_read(own: Collector) -> None:
    own.headers = {"Content-Length": str(1 << 30)}
    own.body = b"x" * (MAX_ANSWER_BYTES * 4)
    with pytest.raises(NotTaken, match="with more than 65536 bytes"):
        connect(address(own.http)).send("logs", MESSAGE)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_hanging_or_absent_collector_times_out(own: Collector, protocol: str) -> None:
    own.gate.clear()
    where = replace(address(own.grpc if protocol == "grpc" else own.http, protocol), timeout_s=0.1)
    if protocol == "grpc":
        own.close()
    begun = monotonic()
    with pytest.raises(NotTaken) as refused:
        connect(where).send("logs", MESSAGE)
    assert refused.value.is_repeatable
    assert monotonic() - begun < 5


def test_a_collector_that_answers_byte_by_byte_times_out() -> None:
    """Each byte arrives in time, but the head of the answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            client, _ = server.accept()
            with client, suppress(OSError):
                client.sendall(b"HTTP/1.1 200 OK\r\n")
                while not is_over.wait(0.05):
                    client.sendall(b"A: b\r\n")

        is_over = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        begun = monotonic()
        with pytest.raises(NotTaken, match="the answer takes too long") as refused:
            connect(address(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)).send("logs", MESSAGE)
        took = monotonic() - begun
        is_over.set()
        thread.join()
    assert refused.value.is_repeatable
    assert took < 2


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_over_tls_is_verified_by_its_certificate(tmp_path: Path, protocol: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with collecting(key, certificate) as collector:
        url = collector.grpc if protocol == "grpc" else collector.http
        where = replace(address(url, protocol, 5.0), is_secure=True, certificate=str(certificate))
        known = connect(where)
        for _ in range(2):
            known.send("logs", MESSAGE)
        known.close()
        assert len(collector.logs) == 2
        for stranger in (replace(where, certificate=""), replace(where, host="localhost"), address(url, protocol, 5.0)):
            sender = connect(stranger)
            with pytest.raises(NotTaken) as refused:
                sender.send("logs", MESSAGE)
            sender.close()
            assert refused.value.is_repeatable
        assert len(collector.logs) == 2


def test_records_wait_for_a_collector_and_none_is_lost(own: Collector) -> None:
    """The first message is refused, so it is sent again after the pause, before the others."""
    own.status, own.headers = 503, {"Retry-After": "1"}
    queue = RecordQueue()
    lines = LogLines(queue)
    logger = logging.Logger("a.model")
    logger.handle = lines.add  # type: ignore[method-assign]
    sender = RecordSender(queue, delivery(address(own.http)), Resource())
    for number in range(MAX_WAITING // 4):  # these wake the thread
        logger.error("line %d", number)
    own_thread = threading.Event()
    while not own.times:
        own_thread.wait(0.01)
    own.status = 200
    own.wait_for(lambda: len(own.records("a.model")) == MAX_WAITING // 4)
    texts = [each.body.string_value for each in own.records("a.model")]
    assert texts == [f"line {number}" for number in range(MAX_WAITING // 4)]
    sender.end()
    sender.join(20)
    assert (sender.sent, sender.dropped) == (MAX_WAITING // 4, 0)


def test_dropped_records_are_counted() -> None:
    queue = RecordQueue()
    for number in range(MAX_WAITING + 7):
        queue.add((number,))
    assert queue.dropped == 7
    assert queue.pop(2) == [(0,), (1,)]


def test_lines_of_the_exporter_are_not_sent() -> None:
    """A failure to send would become another record to send."""
    queue = RecordQueue()
    for name in ("headrace_otel.delivery", "headrace"):
        LogLines(queue).add(logging.makeLogRecord({"name": name, "msg": "%d", "args": (1,)}))
    LogLines(queue).add(logging.makeLogRecord({"name": "headrace", "msg": "%d", "args": ("wrong",)}))
    assert [record[2] for record in queue.pop(9)] == ["headrace"]
    assert queue.dropped == 1


def test_an_error_has_its_traceback_and_no_references() -> None:
    queue = RecordQueue()
    try:
        raise KeyError("no such thing")
    except KeyError as error:
        raised = type(error), error, error.__traceback__
    LogLines(queue).add(logging.makeLogRecord({"name": "m", "msg": "x" * 99_999, "exc_info": raised, "model": "m1"}))
    [line] = queue.pop(1)
    attributes = dict(line[4])
    assert attributes["exception.type"] == "KeyError"
    assert "Traceback (most recent call last)" in attributes["exception.stacktrace"]
    assert attributes["headrace.model"] == "m1"
    assert len(line[3]) == 16 * 1024
    assert {type(value) for value in attributes.values()} <= {str, int}


def test_a_line_in_a_span_has_its_ids() -> None:
    queue = RecordQueue()
    context = SpanContext(0xA7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=True)
    for span in (NonRecordingSpan(context), INVALID_SPAN):
        with use_span(span):
            LogLines(queue).add(logging.makeLogRecord({"name": "m", "levelno": 20, "msg": "in a span"}))
    message = ExportLogsServiceRequest.FromString(write_records(queue.pop(2), Resource()))  # type: ignore[arg-type]
    inside, outside = message.resource_logs[0].scope_logs[0].log_records
    assert (inside.trace_id.hex(), inside.span_id.hex()) == ("00a7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert (outside.trace_id, outside.span_id) == (b"", b"")


def test_a_server_without_the_flags_adds_nothing() -> None:
    options = Server(ServerOptions(model_repository=("m",))).options
    assert AccessRecords(options).enabled is False
    assert not options.group(OtelOptions).is_on


def test_an_invalid_certificate_is_refused_at_the_start(tmp_path: Path) -> None:
    where = replace(address("http://127.0.0.1:1"), certificate=str(tmp_path / "none.pem"), is_secure=True)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_CERTIFICATE=.*none\.pem can not be read"):
        connect(where)
