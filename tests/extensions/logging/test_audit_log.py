"""The audit log: changes, refusals, floods, hostile texts, and full or moved files."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import httpx
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from headrace import Caller, ConfigError, Operation, PermissionDenied, Server, ServerOptions
from headrace_logging import AuditLogOptions
from headrace_logging.audit_lines import Audited, AuditJson, AuditText
from headrace_logging.audit_log import AuditLog
from headrace_logging.audit_trail import LineAllowance
from headrace_logging.secret_texts import without_secrets
from headrace_testing import InterceptorConformance

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
CODE = b"import s3cret_of_a_file"
FILES = {
    "config": json.dumps({"backend": "identity", "parameters": {"api_key": {"string_value": "s3cret"}}}),
    "file:1/model.py": base64.b64encode(CODE).decode(),
}
#: Each category of changes, except loads, needs its own key.
RESTRICTED = "--http-restricted-api=trace,inference:x-key=s3cret"


class TestKit(InterceptorConformance):
    plugin, interceptor = "headrace_logging", "audit-log"

    #: Shared, since a log has a file and a thread, and the kit makes hundreds of interceptors.
    shared: ClassVar[Mapping[str, Any]] = {"plugin_options": [AuditLogOptions(file="/dev/null", format="json")]}

    def options(self) -> Mapping[str, Any]:
        return self.shared


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory, log: Path) -> Headrace:
    models = tmp_path_factory.mktemp("models")
    (models / "m" / "1").mkdir(parents=True)
    (models / "m" / "config.pbtxt").write_text(CONFIG)
    return keep_serving(
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        "--load-model=m",
        "--allow-client-shm=true",
        f"--audit-log-file={log}",
        "--audit-log-format=json",
        RESTRICTED,
    )


@pytest.fixture
def read_records(log: Path, server: Headrace, wait_until: Callable[..., None]) -> Callable[[int], list[dict[str, Any]]]:
    """Reads the lines that are written from the start of the test on, but for what the server does by itself."""
    begun = log.stat().st_size

    def read(count: int) -> list[dict[str, Any]]:
        def lines() -> list[dict[str, Any]]:
            *whole, _ = log.read_bytes()[begun:].split(b"\n")
            return [each for each in map(json.loads, whole) if each.get("event") != "server"]

        wait_until(lambda: len(lines()) >= count, f"{count} lines are written")
        return lines()

    return read


@pytest.fixture
def client(server: Headrace) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=60) as client:
        yield client


def shown(record: Mapping[str, Any], *names: str) -> list[Any]:
    return [record.get(name) for name in ("event", "transport", "operation", "status", "model", *names)]


def test_each_operation_that_changes_something_is_one_line(
    server: Headrace, client: httpx.Client, read_records: Callable[[int], list[dict[str, Any]]]
) -> None:
    client.post("/v2/repository/models/m/load", json={"parameters": FILES})
    client.post("/v2/repository/models/m/load")
    client.post("/v2/repository/index")
    client.get("/v2/logging")
    client.post("/v2/logging", json={"log_verbose_level": 0})
    client.get("/v2/systemsharedmemory/status")
    client.post("/v2/systemsharedmemory/region/r/register", json={"key": "/none", "byte_size": 8})
    client.post("/v2/systemsharedmemory/region/r/unregister")
    client.post("/v2/models/m/trace/setting", json={"trace_rate": "7"}, headers={"x-key": "s3cret"})
    client.post("/v2/models/m/infer", json=BODY, headers={"x-key": "s3cret"})
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as grpc:
        grpc.update_log_settings({"log_info": True})
        grpc.get_log_settings()
        grpc.update_trace_settings("m", {"trace_rate": "9"})
        grpc.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException):
            grpc.load_model("none")
        grpc.load_model("m", config=json.dumps({"backend": "identity", "max_batch_size": 4, **_tensors()}))
        grpc.unload_model("m")
        grpc.load_model("m")
    records = read_records(13)
    assert [shown(each) for each in records] == [
        ["operation", "http", "load", "ok", "m"],
        ["operation", "http", "load", "ok", "m"],
        ["operation", "http", "log_settings", "ok", None],
        ["operation", "http", "shared_memory_register", "Internal", None],
        ["operation", "http", "shared_memory_unregister", "ok", None],
        ["operation", "http", "trace_settings", "ok", "m"],
        ["operation", "grpc", "log_settings", "ok", None],
        ["operation", "grpc", "trace_settings", "ok", "m"],
        ["operation", "grpc", "shared_memory_unregister", "ok", None],
        ["operation", "grpc", "load", records[9]["status"], "none"],
        ["operation", "grpc", "load", "ok", "m"],
        ["operation", "grpc", "unload", "ok", "m"],
        ["operation", "grpc", "load", "ok", "m"],
    ]
    assert records[0]["sizes"] == {"config": len(FILES["config"]), "file:1/model.py": len(CODE)}
    assert records[9]["status"] != "ok"
    assert records[2]["settings"] == {"log_verbose_level": 0}
    assert (records[3]["region"], records[3]["key"], records[3]["byte_size"]) == ("r", "/none", 8)
    assert records[5]["settings"] == {"rate": 7}
    assert "/none" in records[3]["error"]
    assert {each["peer"] for each in records} == {"127.0.0.1"}


def _tensors() -> dict[str, Any]:
    return {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }


def test_actions_of_the_server_are_recorded(server: Headrace, log: Path) -> None:
    first, second = (json.loads(line) for line in log.read_text().splitlines()[:2])
    assert (first["event"], first["operation"], first["model"]) == ("server", "model_loaded", "m")
    assert (second["operation"], second["pid"]) == ("server_started", server.process.pid)


def test_a_refusal_by_another_interceptor_is_recorded_also_for_an_inference(
    client: httpx.Client, read_records: Callable[[int], list[dict[str, Any]]]
) -> None:
    hostile = "m\n\x1b[31m" + "x" * 5000
    assert client.post("/v2/models/m/infer", json=BODY).status_code == 403
    assert client.post("/v2/models/m/trace/setting", json={}, headers={"x-key": "guess-s3cret"}).status_code == 403
    path = quote(hostile, safe="")
    assert client.post(f"/v2/models/{path}/infer").status_code == 403
    records = read_records(3)
    assert [shown(each) for each in records[:2]] == [
        ["refused", "http", "infer", "Permission denied", "m"],
        ["refused", "http", "trace_settings", "Permission denied", "m"],
    ]
    assert records[0]["error"] == "This API is restricted, expecting header 'x-key'"
    assert records[2]["model"] == path[:256]


def test_no_secret_of_an_operation_is_written(
    client: httpx.Client, log: Path, read_records: Callable[[int], list[dict[str, Any]]]
) -> None:
    client.post("/v2/repository/models/m/load", json={"parameters": FILES}, headers={"authorization": "Bearer s3cret"})
    assert "s3cret" not in json.dumps(read_records(1))
    assert "s3cret" not in log.read_text()
    assert base64.b64encode(CODE[7:]).decode()[:12] not in log.read_text()


def test_a_flood_of_refusals_is_bounded_and_counted(
    server: Headrace,
    client: httpx.Client,
    read_records: Callable[[int], list[dict[str, Any]]],
    wait_until: Callable[..., None],
) -> None:
    count = 400
    for _ in range(count):
        client.post("/v2/models/m/infer", json=BODY)

    def refusals() -> int:
        records = read_records(1)
        return sum(each["event"] == "refused" or each.get("refusals", 0) for each in records)

    wait_until(lambda: refusals() == count, "all refusals are written or counted")
    written = [each for each in read_records(1) if each["event"] == "refused"]
    assert 0 < len(written) < 150  # 10 a second, and 10 seconds of them at once
    page = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").text
    assert f"headrace_audit_log_left_out_total {count - len(written)}" in page
    client.post("/v2/logging", json={"log_info": True})
    assert any(each["operation"] == "log_settings" for each in read_records(len(written) + 2) if "operation" in each)


# ---------------------------------------------------------------------- without a server


def test_lines_of_plugins_are_recorded_from_any_thread(
    tmp_path: Path, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a changed access file or a new certificate, which no caller has requested."""
    path, repository = tmp_path / "audit.log", tmp_path / "models"
    repository.mkdir()
    options = AuditLogOptions(file=str(path))
    with Server(ServerOptions(model_repository=(str(repository),), plugin_options=(options,))):
        caplog.set_level(logging.INFO, "headrace")  # as headrace serve does
        logger = logging.getLogger("headrace.audit.access")
        logger.info("access file '%s' has changed\nforged", "x.json")
        thread = threading.Thread(target=logger.error, args=("the former keys stay in use",))
        thread.start()
        thread.join()
        wait_until(lambda: path.read_text().count("server log ") == 2, "both are written")
    logging.getLogger("headrace.audit.access").error("the server has ended")
    lines = [line.partition(" server log ")[2] for line in path.read_text().splitlines() if " server log " in line]
    assert lines == [
        "level=INFO logger=headrace.audit.access message=\"access file 'x.json' has changed\\nforged\"",
        'level=ERROR logger=headrace.audit.access message="the former keys stay in use"',
    ]


def test_two_servers_of_one_process_have_separate_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / name / "1").mkdir(parents=True)
        (tmp_path / name / name / "config.pbtxt").write_text(CONFIG)
    logs = [AuditLogOptions(file=str(tmp_path / "a.log"), format="json"), AuditLogOptions(file=str(tmp_path / "b.log"))]
    one, other = (
        Server(ServerOptions(id=name, model_repository=(str(tmp_path / name),), plugin_options=(options,)))
        for name, options in zip("ab", logs, strict=True)
    )
    with one, other, Server(tmp_path / "a") as without:
        assert [each.name for each in without.engine.extensions if each.name == "audit-log"] == []
    found = [json.loads(line) for line in (tmp_path / "a.log").read_text().splitlines()]
    assert [(each["operation"], each.get("model") or each["id"]) for each in found] == [
        ("model_loaded", "a"), ("server_started", "a"), ("server_stopping", "a"), ("model_unloaded", "a")
    ]  # fmt: skip
    lines = (tmp_path / "b.log").read_text().splitlines()
    assert [line.split()[2] for line in lines] == [each["operation"] for each in found]
    assert [("model=b" in line, "id=b" in line) for line in lines] == [
        (True, False), (False, True), (False, True), (True, False)
    ]  # fmt: skip


def test_an_allowance_is_a_rate_with_a_burst() -> None:
    allowance, now = LineAllowance(10), monotonic_ns()
    assert sum(allowance.allows(now) for _ in range(1000)) == 101
    assert sum(allowance.allows(now + 1_000_000_000) for _ in range(1000)) == 10
    assert not any(LineAllowance(0).allows(now + each) for each in range(100))


@pytest.fixture
def full(tmp_path: Path) -> AuditLog:
    """An audit log with a file of 3 MiB, where the limit is 1 MiB for refusals and 2 MiB for operations."""
    path = tmp_path / "audit.log"
    path.write_bytes(b"x" * (3 << 20))
    return AuditLog(ServerOptions(plugin_options=(AuditLogOptions(file=str(path), size=1),)))


def test_a_full_file_gets_no_line_until_it_is_moved(
    full: AuditLog, tmp_path: Path, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    trail, path = full._trail, tmp_path / "audit.log"
    trail.event("server_started")  # the thread finds the size
    wait_until(lambda: trail.file.written == 1, "the event is written")

    async def refuse() -> None:
        caller = Caller("http")
        caller.operation = Operation.INFER
        full.refused(caller, PermissionDenied("no"))

    asyncio.run(refuse())
    assert (trail.left_out, trail.file.written) == (1, 1)
    path.rename(tmp_path / "audit.log.1")
    trail.event("server_started")
    wait_until(lambda: trail.file.written == 2, "the event is written to a new file")
    asyncio.run(refuse())
    wait_until(lambda: trail.file.written == 3, "the refusal is written")
    trail.close()
    assert "refused http infer" in path.read_text()


def test_a_full_disk_loses_only_lines(caplog: pytest.LogCaptureFixture, wait_until: Any) -> None:
    trail = AuditLogOptions(file="/dev/full").trail
    trail.event("server_started")
    wait_until(lambda: trail.file.dropped == 1, "the line is dropped")
    trail.close()
    assert "the audit log '/dev/full' can not be written" in caplog.text


@pytest.mark.parametrize(("path", "reason"), [("/", "Is a directory"), ("{fifo}", "it is a FIFO that nobody reads")])
def test_a_file_that_can_not_be_opened_is_named(tmp_path: Path, path: str, reason: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = path.format(fifo=tmp_path / "fifo")
    with pytest.raises(ConfigError, match=rf"^--audit-log-file={path} can not be opened: {reason}"):
        AuditLog(ServerOptions(plugin_options=(AuditLogOptions(file=path),)))


@pytest.mark.parametrize("name", ["refusals", "size"])
def test_wrong_bounds_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--audit-log-{name} is -1"):
        AuditLogOptions(file="x", **{name: -1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need --audit-log-file"):
        AuditLogOptions(**{name: 5})  # type: ignore[arg-type]


def test_no_text_ends_a_line_or_adds_a_field() -> None:
    evil = 'a\n{"event":"operation"} status=ok\x1b[2J\u2028' + "x" * 1_000_000
    record = Audited(0, "refused", "http", "infer", "Not found", evil, evil, evil, evil, {"of": evil, evil: 1}, evil)
    for lines in (AuditText(), AuditJson()):
        written = lines.lines([record], 0)
        assert written.count("\n") == 1
        assert written.isprintable() or written[:-1].isprintable()
        assert len(written) < 8000
    assert json.loads(AuditJson().lines([record], 0))["principal"] == evil[:256]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://user:s3cret@host/x and redis://:s3cret@h:1", "s3://***@host/x and redis://***@h:1"),
        ("GET /x?X-Amz-Signature=s3cret&a=1", "GET /x?X-Amz-Signature=***&a=1"),
        ("?sig=s3cret", "?sig=***"),
        ("Authorization: Bearer s3cret.x", "Authorization: Bearer ***"),
        ("token eyJhbGciOi.eyJzdWIi.s3cret here", "token *** here"),
        ("model 'key' of a=b", "model 'key' of a=b"),
    ],
)
def test_secrets_in_texts_are_removed(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
