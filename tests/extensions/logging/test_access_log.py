"""The access log: operations of every protocol, hostile texts, and files that are slow, full or moved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from headrace import BatchTimes, Code, ConfigError, FinishedInference, ServerOptions
from headrace_logging import AccessLogOptions
from headrace_logging.access_lines import Access, JsonLines, TextLines
from headrace_logging.access_log import DROPPED, AccessLog
from headrace_logging.line_file import GATHER_S, MAX_WAITING, LineFile
from headrace_testing import InterceptorConformance
from tests.e2e.lines import Lines

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
BODY = {"id": "r7", "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
PROBE = re.compile(r"^\S+ http (ready|live) |\"operation\":\"(ready|live)\"")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-{'1' * 16}-01"}
TIMES = BatchTimes(1_500_000, 1_600_000, 3_400_000, 3_500_000)
#: It began 5 ms before 1970, on a clock that is 5 ms ahead of the wall.
FINISHED = FinishedInference(
    0, "http", "192.0.2.1", "", PARENT["traceparent"], "m", 1, "r7", 8, None, 8, 5_000_000, 500_000, TIMES
)
RECORD = Access(FINISHED, "infer", 1)


class TestKit(InterceptorConformance):
    plugin, interceptor = "headrace_logging", "access-log"

    #: Shared, since a log has a file and a thread, and the kit makes hundreds of interceptors.
    shared: ClassVar[Mapping[str, Any]] = {"plugin_options": [AccessLogOptions(file="/dev/null", format="json")]}

    def options(self) -> Mapping[str, Any]:
        return self.shared


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("m", "other"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def lines_of(wait_until: Callable[..., None]) -> Callable[[Path, int], list[str]]:
    def read(path: Path, count: int) -> list[str]:
        """Wait until ``path`` has ``count`` lines, and return them without those of readiness checks."""

        def found() -> list[str]:
            *lines, _ = path.read_text().split("\n")
            return [line for line in lines if not PROBE.search(line)]

        wait_until(lambda: len(found()) >= count, f"{path.name} has {count} lines")
        lines = found()
        assert len(lines) == count, lines
        return lines

    return read


@pytest.fixture
def operations(lines_of: Callable[[Path, int], list[str]]) -> Callable[[Path, int], list[dict[str, Any]]]:
    """`lines_of` for JSON lines."""

    def read(path: Path, count: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in lines_of(path, count)]

    return read


def tensor() -> Any:
    return tritonclient.grpc.InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32))


OTHERS = ("--http-server=hypercorn", "--grpc-server=grpcio")
#: An interceptor that refuses. Beside it, every operation has a caller; without it, core records most inferences.
RESTRICTED = ("--http-restricted-api=model-repository:secret=1",)


@pytest.mark.parametrize(
    "words", [(), OTHERS, RESTRICTED, (*OTHERS, *RESTRICTED)], ids=["native", "others", "callers", "others, callers"]
)
def test_each_operation_of_any_protocol_and_outcome_is_one_line(
    serve: Callable[..., Headrace],
    models: Path,
    log: Path,
    operations: Callable[[Path, int], list[dict[str, Any]]],
    words: tuple[str, ...],
) -> None:
    server = serve(
        f"--model-repository={models}", f"--access-log-file={log}", "--access-log-format=json", *words
    )  # fmt: skip
    http = f"http://127.0.0.1:{server.http}"
    assert httpx.post(f"{http}/v2/models/m/infer", json=BODY, headers=PARENT).is_success
    assert httpx.post(f"{http}/v2/models/m/infer", json={**BODY, "inputs": []}).status_code == 400
    assert httpx.post(f"{http}/v2/models/m/infer", content=b"{").status_code == 500
    assert httpx.post(f"{http}/v2/models/none/infer", json=BODY).status_code == 404
    assert httpx.post(f"{http}/v2/repository/index").status_code == (403 if RESTRICTED[0] in words else 200)
    assert httpx.get(f"{http}/v2/models/m").status_code == 200
    generated = httpx.post(f"{http}/v2/models/m/generate_stream", json={"x": [1.0, 2.0]})
    assert generated.status_code == 200
    found: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.infer("m", [tensor()], request_id="g1", headers=PARENT)
        with pytest.raises(InferenceServerException):
            client.infer("none", [tensor()], request_id="g2")
        client.start_stream(lambda result, error: found.append(error or result))
        client.async_stream_infer("m", [tensor()], request_id="s1")
        client.async_stream_infer("none", [tensor()], request_id="s2")
        client.stop_stream()
    assert httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").status_code == 200
    records = operations(log, 13)
    shown = [
        (each["transport"], each["operation"], each.get("model"), each.get("request_id"), each["status"])
        for each in records
    ]
    assert shown[:7] == [
        ("http", "infer", "m", "r7", "ok"),
        ("http", "infer", "m", "r7", "Invalid argument"),
        ("http", "infer", "m", None, shown[2][4]),
        ("http", "infer", "none", None, "Not found"),
        ("http", "index", None, None, "Permission denied" if RESTRICTED[0] in words else "ok"),
        ("http", "model_metadata", "m", None, "ok"),
        ("http", "generate", "m", None, "ok"),
    ]
    assert shown[2][4] != "ok"
    assert sorted(shown[7:], key=str) == sorted(
        [
            ("grpc", "infer", "m", "g1", "ok"),
            ("grpc", "infer", "none", None, "Not found"),
            ("grpc", "infer", "m", "s1", "ok"),
            ("grpc", "infer", "none", None, "Not found"),
            ("grpc", "open_stream", None, None, "ok"),
            ("metrics", "metrics", None, None, "ok"),
        ],
        key=str,
    )
    for each in records:
        executed = each["status"] == "ok" and each["operation"] in ("infer", "generate")
        assert ("compute_us" in each) == executed
        if executed:
            assert (each["version"], each["request_bytes"], each["response_bytes"], each["responses"]) == ("1", 8, 8, 1)
            assert 0 <= each["queue_us"] + each["compute_us"] <= each["duration_us"] < 60_000_000
        assert each["peer"] == "127.0.0.1"
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", each["time"])
    assert [each["operation"] for each in records if each.get("trace_id") == TRACE] == ["infer", "infer"]


def text_line(record: Access) -> str:
    return TextLines().lines([record], -5_000_000).removesuffix("\n")


def json_line(record: Access) -> str:
    return JsonLines().lines([record], -5_000_000)


HOSTILE = [
    "r7\n2026-01-01T00:00:00.000000Z http infer status=ok",
    'a" status=ok',
    "\x1b[2J\u2028\u202e\x85",
    "é" * 1000,
    "\ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_callers_cannot_forge_lines(text: str) -> None:
    hostile = Access(FINISHED._replace(id=text, model=text, principal=text, traceparent=text), "infer", 1)
    (line,) = text_line(hostile).splitlines()
    assert line.isascii()
    assert line.isprintable()
    fields = dict(re.findall(r' (\w+)=("(?:[^"\\]|\\.)*"|[^" ]+)', line))
    assert {name: fields[name] for name in ("status", "duration_us", "version")} == {
        "status": "ok", "duration_us": "5000", "version": "1"
    }  # fmt: skip
    assert json.loads(fields["id"]) == json.loads(fields["model"]) == text[:256]
    (line,) = json_line(hostile).splitlines()
    assert line.isascii()
    read = json.loads(line)
    assert read["request_id"] == read["model"] == read["principal"] == text[:256]
    assert "trace_id" not in read


def test_a_plain_record_is_easy_to_read() -> None:
    assert text_line(RECORD) == (
        "1970-01-01T00:00:00.000000Z http infer status=ok duration_us=5000 peer=192.0.2.1 model=m version=1 id=r7 "
        f"request_bytes=8 response_bytes=8 responses=1 queue_us=1000 compute_us=2000 trace={TRACE}"
    )
    assert json.loads(json_line(RECORD)) == {
        "time": "1970-01-01T00:00:00.000000Z", "transport": "http", "operation": "infer", "status": "ok",
        "duration_us": 5000, "peer": "192.0.2.1", "model": "m", "version": "1", "request_id": "r7", "request_bytes": 8,
        "response_bytes": 8, "responses": 1, "queue_us": 1000, "compute_us": 2000, "trace_id": TRACE,
    }  # fmt: skip
    assert (TextLines.dropped_line(3), json.loads(JsonLines.dropped_line(3))) == (
        "# 3 records were dropped\n",
        {"dropped": 3},
    )


def test_a_record_of_core_equals_that_of_an_operation() -> None:
    failed = FINISHED._replace(code=Code.UNAVAILABLE)
    records = [tuple(FINISHED), tuple(failed), RECORD, Access(failed, "infer", 0), tuple(FINISHED)]
    done, refused, *others = TextLines().lines(records, -5_000_000).splitlines()
    assert others == [done, refused, done]
    assert [text in done for text in ("status=ok", " responses=1 ")] == [True, True], done
    assert [text in refused for text in (f"status={Code.UNAVAILABLE.value}", " responses=0 ")] == [True, True], refused


def test_a_forged_id_of_a_real_request_is_one_line(
    serve: Callable[..., Headrace], models: Path, log: Path, lines_of: Callable[[Path, int], list[str]]
) -> None:
    server = serve(f"--model-repository={models}", f"--access-log-file={log}")
    url = f"http://127.0.0.1:{server.http}/v2/models"
    assert httpx.post(f"{url}/m/infer", json={**BODY, "id": HOSTILE[0]}).is_success
    assert httpx.post(f"{url}/a%0Ab%20status=ok/infer", json=BODY).is_error
    first, second = lines_of(log, 2)
    assert r'id="r7\n2026' in first
    assert " status=ok" not in second.replace(second.partition("model=")[2], "")


def test_a_file_that_was_moved_is_opened_again(
    serve: Callable[..., Headrace],
    models: Path,
    log: Path,
    lines_of: Callable[[Path, int], list[str]],
    wait_until: Callable[..., None],
) -> None:
    server = serve(f"--model-repository={models}", f"--access-log-file={log}")
    url = f"http://127.0.0.1:{server.http}/v2/models/m/infer"
    httpx.post(url, json=BODY)
    lines_of(log, 1)
    for name, move in (("r8", lambda: log.rename(log.with_suffix(".1"))), ("r9", log.unlink)):
        move()
        httpx.post(url, json={**BODY, "id": name})
        wait_until(log.exists, "the file is made anew")
        (line,) = lines_of(log, 1)
        assert f"id={name}" in line
    lines_of(log.with_suffix(".1"), 1)


def test_a_full_disk_fails_no_request_and_is_logged_once(
    serve: Callable[..., Headrace], models: Path, wait_until: Callable[..., None]
) -> None:
    server = serve(f"--model-repository={models}", "--access-log-file=/dev/full")
    url = f"http://127.0.0.1:{server.http}/v2/models/m/infer"
    for count in (1, 2):
        assert httpx.post(url, json=BODY).is_success
        wait_until(lambda count=count: number(server, DROPPED) >= count, f"{count} are dropped")
    server.stop()
    warnings = [line for line in server.lines if "can not be written, and records are dropped" in line]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


def number(server: Headrace, metric: str) -> int:
    page = server.get("/metrics", server.ports["Metrics Service"])[1].decode()
    (found,) = re.findall(rf"^{metric} (\d+)", page, re.MULTILINE)
    return int(found)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A FIFO, and the descriptor of its reader, which need not read."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    with contextlib.suppress(OSError):
        os.close(reader)


def test_a_blocked_file_delays_neither_requests_nor_the_stop(
    serve: Callable[..., Headrace], models: Path, pipe: tuple[Path, int], wait_until: Callable[..., None]
) -> None:
    path, _ = pipe
    server = serve(f"--model-repository={models}", f"--access-log-file={path}")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:
        for _ in range(1000):  # about 200 KB, where a pipe holds 64 KiB
            assert client.post("/v2/models/m/infer", json=BODY).is_success
    server.stop()


def test_the_queue_is_bounded_and_drops_are_recorded(
    pipe: tuple[Path, int], wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path, reader = pipe
    lines = LineFile(str(path), TextLines(), "access log", "--access-log-file")
    count = MAX_WAITING + 3000  # the pipe takes 64 KiB, and the thread has 512 records

    async def fill() -> None:
        for _ in range(MAX_WAITING + 1000):
            lines.add(RECORD)
        while lines.add == lines._waiting.append:  # until the number of waiting ones is checked
            await asyncio.sleep(GATHER_S / 10)
        for _ in range(2000):
            lines.add(RECORD)

    asyncio.run(fill())
    assert lines.dropped == 2000
    lines._wake.set()  # the loop has ended before it could
    assert sum("takes lines too slowly" in record.message for record in caplog.records) == 1
    got = b""

    def is_drained() -> bool:
        nonlocal got
        with contextlib.suppress(BlockingIOError):
            got += os.read(reader, 1 << 20)
        return lines.written + lines.dropped == count

    wait_until(is_drained, "all is written")
    lines.close()
    is_drained()
    notes = [int(line.split()[1]) for line in got.decode().splitlines() if line.startswith("#")]
    assert sum(notes) == lines.dropped
    assert got.count(b"\n") == lines.written + len(notes)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/", "Is a directory"), ("/none/x", "No such file or directory"), ("{fifo}", "it is a FIFO that nobody reads")],
)
def test_a_file_that_can_not_be_opened_is_refused_at_the_start(tmp_path: Path, path: str, reason: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = path.format(fifo=tmp_path / "fifo")
    options = ServerOptions(plugin_options=[AccessLogOptions(file=path)])
    with pytest.raises(ConfigError, match=re.escape(f"--access-log-file={path} can not be opened: {reason}")):
        AccessLog(options)


@pytest.mark.parametrize("wrong", [{"file": "x", "sample": 0}, {"sample": 2}, {"format": "json"}])
def test_flags_without_effect_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--access-log-"):
        AccessLogOptions(**wrong)


def test_one_in_n_operations_is_logged(
    serve: Callable[..., Headrace], models: Path, log: Path, lines_of: Callable[[Path, int], list[str]]
) -> None:
    server = serve(f"--model-repository={models}", f"--access-log-file={log}", "--access-log-sample=10")
    for _ in range(100):
        httpx.post(f"http://127.0.0.1:{server.http}/v2/models/m/infer", json=BODY)
    lines_of(log, 10)


def test_workers_write_whole_lines_to_one_file(
    serve: Callable[..., Headrace], models: Path, log: Path, operations: Callable[[Path, int], list[dict[str, Any]]]
) -> None:
    server = serve(
        f"--model-repository={models}", f"--access-log-file={log}", "--access-log-format=json", "--workers=2"
    )
    server.wait_for_line("2 workers serve")
    with contextlib.closing(Lines(server, "worker")) as lines:
        first, second = lines.one_each()
        for _ in range(50):
            assert first.get("/v2/models/m")[0] == second.get("/v2/models/m")[0] == 200
        records = operations(log, 100)
    assert [each["operation"] for each in records].count("model_metadata") == 100
