"""Trace files, compared with those of a real Triton for the same requests."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headrace import ConfigError, ServerOptions
from headrace.config.option_parts import TraceSetting
from headrace_trace.start_settings import read_options
from headrace_trace.trace_command import TraceCommand
from tests.e2e.lines import Lines
from tests.extensions.trace.recorded import TRACE_ALL, ask, counters, infer_adds, infer_all

if TYPE_CHECKING:
    from tests.conftest import Headrace

TRITONS = json.loads(Path(__file__).with_name("triton.json").read_text())
#: The order of the events of a request.
ORDER = (
    "HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END",
)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def by_id(records: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found = defaultdict(list)
    for record in records:
        found[record["id"]].append(record)
    return dict(found)


def model_of(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return next(({**record} for record in records if "model_name" in record), {})


def stamps(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    found = (record["timestamps"][0] for record in records if "timestamps" in record)
    return {each["name"]: each["ns"] for each in found}


def summary(records: list[dict[str, Any]]) -> list[Any]:
    """Return each request of a file without ids and times: model, parent, events and tensors."""
    calls = by_id(records)
    found = []
    for call in calls.values():
        model = model_of(call)
        parent = model_of(calls[model["parent_id"]])["model_name"] if "parent_id" in model else None
        own = {key: value for key, value in model.items() if key not in ("id", "parent_id")}
        tensors = [(record["activity"], record["tensor"]) for record in call if "activity" in record]
        found.append([own, parent, sorted(stamps(call)), tensors])
    return sorted(found, key=repr)


def refused(run_headrace: Callable[..., Headrace], *words: str) -> str:
    """Start a server that must exit with code 1. Return its log."""
    server = run_headrace(*words)
    assert server.process.wait(60) == 1
    server.finish()
    return server.log


def test_a_trace_file_equals_tritons(start: Callable[..., Headrace], all_models: Path, trace_file: Path) -> None:
    """The same requests three times: with times and tensors, with times only, and with a level of ``adds`` alone."""
    server = start("level=OFF", models=all_models)
    infer_adds(server.http, 1)
    for path, settings in (
        ("/v2/trace/setting", TRACE_ALL),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
        ("/v2/models/adds/trace/setting", {"trace_level": ["OFF"]}),
    ):
        assert ask(server.http, path, settings)[0] == 200
        infer_all(server.http, server.grpc)
    server.stop()
    records, first, last = read(trace_file), *(len(by_id(TRITONS)) * times for times in (1, 2))
    assert summary([record for record in records if record["id"] <= first]) == summary(TRITONS), (
        "the first is not traced"
    )
    check_times(by_id(record for record in records if first < record["id"] <= last))
    roots = by_id(record for record in records if record["id"] > last).values()
    sampled = {model["model_name"] for call in roots if "parent_id" not in (model := model_of(call))}
    assert sampled == {"calls", "fails", "twice", "many"}


def check_times(calls: Mapping[int, list[dict[str, Any]]]) -> None:
    """Fail unless times are in order and models run within their callers, without tensors."""
    for call in calls.values():
        times, model = stamps(call), model_of(call)
        ordered = [times[name] for name in ORDER if name in times]
        assert ordered == sorted(ordered)
        assert "activity" not in {key for record in call for key in record}
        if "parent_id" in model:
            outer = stamps(calls[model["parent_id"]])
            assert outer["QUEUE_START"] <= times["REQUEST_START"] <= times["REQUEST_END"] <= outer["REQUEST_END"]


def test_every_nth_request_is_traced_until_the_count_is_reached(
    start: Callable[..., Headrace], trace_file: Path
) -> None:
    server = start("level=TIMESTAMPS", "rate=3", "count=2")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:
        for number in range(12):
            body = {"id": str(number), "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
            assert client.post("/v2/models/adds/infer", json=body).status_code == 200
    server.stop()
    found = read(trace_file.with_name("trace.json.0"))  # of a count that is reached, as in Triton
    assert [model_of(call)["request_id"] for call in by_id(found).values()] == ["2", "5"]
    assert not trace_file.exists()


def test_log_frequency_starts_a_new_file_after_that_many_requests(
    start: Callable[..., Headrace], trace_file: Path
) -> None:
    server = start("level=TIMESTAMPS", "rate=1", "triton,log-frequency=2")
    for _ in range(5):
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
        assert ask(server.http, "/v2/models/adds/infer", body)[0] == 200
    server.stop()
    counts = [len(by_id(read(trace_file.with_name(f"trace.json.{index}")))) for index in range(3)]
    assert counts == [2, 2, 1]


def test_a_refused_request_is_traced_until_its_refusal(start: Callable[..., Headrace], trace_file: Path) -> None:
    """Triton loses the whole file by such a request."""
    server = start("level=TIMESTAMPS", "rate=1")
    assert ask(server.http, "/v2/models/adds/infer", {"inputs": 5})[0] == 500
    assert ask(server.http, "/v2/models/nobody/infer", {"inputs": []})[0] == 404
    server.stop()
    for call in by_id(read(trace_file)).values():
        assert sorted(stamps(call)) == ["HTTP_RECV_END", "HTTP_RECV_START", "HTTP_SEND_END", "HTTP_SEND_START"]


BROKEN: list[dict[str, Any]] = [
    {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": 6}},
    {"name": "x", "datatype": "FP32", "shape": [1, 7], "parameters": {"binary_data_size": 6}},
    {"name": "x", "datatype": "NONE", "shape": [1, 2], "parameters": {"binary_data_size": 6}},
]


def test_tensors_that_can_not_be_decoded_are_refused_as_without_tracing(
    start: Callable[..., Headrace], trace_file: Path
) -> None:
    server = start("level=TENSORS", "rate=2")
    for entry in BROKEN:
        head = json.dumps({"id": "same", "inputs": [entry]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        url = f"http://127.0.0.1:{server.http}/v2/models/adds/infer"
        untraced, traced = (httpx.post(url, content=head + b"abcdef", headers=headers) for _ in range(2))
        assert untraced.status_code in (400, 500)
        assert (traced.status_code, traced.text) == (untraced.status_code, untraced.text)
    server.stop()
    assert len(by_id(read(trace_file))) == len(BROKEN)


@pytest.mark.parametrize("place", ["nowhere/trace.json", "models", "unread_fifo"])
def test_a_file_that_can_not_be_written_fails_no_request(
    serve: Callable[..., Headrace], models: Path, tmp_path: Path, place: str
) -> None:
    os.mkfifo(tmp_path / "unread_fifo")
    words = [f"--trace-config={each}" for each in (f"triton,file={tmp_path / place}", "level=TIMESTAMPS", "rate=1")]
    server = serve(f"--model-repository={models}", *words)
    infer_adds(server.http)
    server.wait_for_line(f"a trace is dropped: '.*{place}': ")
    server.stop()
    assert server.log.count("a trace is dropped") < 12


def test_a_full_disk_fails_no_request_and_is_counted(serve: Callable[..., Headrace], models: Path) -> None:
    words = [f"--trace-config={each}" for each in ("triton,file=/dev/full", "level=TIMESTAMPS", "rate=1")]
    server = serve(f"--model-repository={models}", *words)
    infer_adds(server.http)
    server.wait_for_line("a trace is dropped: .*No space left")
    counted = counters(server)
    assert counted["headrace_trace_dropped_total"] > 0 == counted["headrace_trace_written_total"]


WRONG = [
    "rate=x", "rate=0", "rate=1.5", "level=WHAT", "mode=what", "count=-2", "triton,what=1", "triton,log-frequency=x",
    "opentelemetry,url=http://", "opentelemetry,url=ftp://host", "opentelemetry,protocol=http/json",
    "opentelemetry,bsp_max_queue_size=0", "opentelemetry,resource=x", "opentelemetry,protocol=udp",
    "opentelemetry,bsp_schedule_delay=x",
]  # fmt: skip


@pytest.mark.parametrize("setting", WRONG)
@pytest.mark.parametrize(
    "place",
    [("triton", "file", "trace.json"), ("", "mode", "opentelemetry"), None],
    ids=["to a file", "to a collector", "to nowhere"],
)
def test_a_wrong_setting_is_refused_also_without_a_level(setting: str, place: tuple[str, str, str] | None) -> None:
    mode, comma, rest = setting.partition(",")
    key, _, value = (rest if comma else mode).partition("=")
    settings = [*([TraceSetting(*place)] if place else []), TraceSetting(mode if comma else "", key, value)]
    with pytest.raises(ConfigError, match=r"^--trace-config"):
        read_options(ServerOptions(trace_config=tuple(settings)))


def test_a_wrong_flag_stops_the_start(run_headrace: Callable[..., Headrace], models: Path) -> None:
    assert "--trace-config: rate expects" in refused(
        run_headrace, f"--model-repository={models}", "--trace-config=rate=0"
    )


def test_each_worker_has_its_own_file(
    serve: Callable[..., Headrace], models: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "echo/1").mkdir(parents=True)
    tensor = '{ name: "%s" data_type: TYPE_FP32 dims: 1 }'
    (models / "echo/config.pbtxt").write_text(f'backend: "identity" input {tensor % "IN"} output {tensor % "OUT"}')
    words = [f"--trace-config={each}" for each in (f"triton,file={trace_file}", "level=TIMESTAMPS", "rate=1")]
    only = ("--model-control-mode=explicit", "--load-model=echo")
    server = serve(f"--model-repository={models}", "--workers=2", *only, *words)
    server.wait_for_line("2 workers serve")
    with contextlib.closing(Lines(server, "worker")) as lines:
        owners = []
        for line in lines.one_each():
            owners.append(line.owner)
            for _ in range(3):
                line.ask("echo")
                assert line.answer() == [1.5]
    server.stop()
    files = sorted(trace_file.parent.glob("trace.json.*"))
    assert [int(file.name.rpartition(".")[2]) for file in files] == sorted(owners)
    assert [len(by_id(read(file))) for file in files] == [3, 3]
    assert not trace_file.exists()
    command = TraceCommand()
    assert command.run(command.parse([*map(str, files)])) == 0
    assert re.search(r"echo +\| 1 +\| 6 ", capsys.readouterr().out)


def test_a_level_without_a_file_stops_the_start(run_headrace: Callable[..., Headrace], models: Path) -> None:
    stderr = refused(run_headrace, f"--model-repository={models}", "--trace-config=level=TIMESTAMPS")
    assert "--trace-config: trace file name is not given" in stderr
