"""The trace settings over HTTP and gRPC, compared with the answers of a real Triton."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc
import tritonclient.http

from headrace_testing import ExtensionConformance, ServedExtension
from tests.extensions.trace.recorded import RECORD, ask, call, counters, infer_adds, write_adds

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORDED = json.loads(RECORD.read_text())
WHOLE, ADDS = "/v2/trace/setting", "/v2/models/adds/trace/setting"
#: The settings that a caller may change.
CLEARED = ("trace_level", "trace_rate", "trace_count", "log_frequency")
START = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_mode": "triton",
}  # fmt: skip


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_trace", "trace"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("GET", "/v2/trace/setting")
        assert (status, json.loads(body)) == (200, {**START, "trace_file": ""})


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def shared(
    trace_file: Path, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]
) -> Headrace:
    models = write_adds(tmp_path_factory.mktemp("models"))
    words = (f"--trace-config=triton,file={trace_file}", "--trace-config=level=OFF")
    return keep_serving(f"--model-repository={models}", *words)


@pytest.fixture
def server(shared: Headrace) -> Headrace:
    """A server with the settings of its start."""
    for path in (WHOLE, ADDS):
        assert ask(shared.http, path, dict.fromkeys(CLEARED))[0] == 200
    found = ask(shared.http, ADDS, None)[1]
    assert {name: found[name] for name in START} == START
    return shared


def with_file(answer: Any, path: Path) -> Any:
    """``answer`` of the recorded Triton, with the trace file of this test."""
    return json.loads(json.dumps(answer).replace("/tmp/tr/t.json", str(path)))


def test_http_answers_as_triton_does(server: Headrace, trace_file: Path) -> None:
    for path, body, status, answer in RECORDED["http"]:
        assert [path, body, *ask(server.http, path, body)] == [path, body, status, with_file(answer, trace_file)]


def test_grpc_answers_as_triton_does(server: Headrace, trace_file: Path) -> None:
    for model, settings, code, answer in RECORDED["grpc"]:
        expected = [model, settings, code, with_file(answer, trace_file)]
        assert [model, settings, *call(server.grpc, model, settings)] == expected


#: Triton 2.51's answers in this order: with a level, the rate cannot be 0.
ZERO = {"error": "Attempting to set invalid trace setting :sample rate must be non-zero"}
RATES: list[tuple[str, Any, int]] = [
    ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}, 200),
    ("/v2/trace/setting", {"trace_rate": "0"}, 400),
    ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "0"}, 400),
    ("/v2/models/adds/trace/setting", {"trace_rate": "0"}, 400),
    ("/v2/models/adds/trace/setting", {"trace_level": ["OFF"], "trace_rate": "0"}, 200),
    ("/v2/models/adds/trace/setting", {"trace_level": None}, 400),
    ("/v2/models/adds/trace/setting", {"trace_rate": None}, 200),
]


def test_a_level_needs_a_rate(server: Headrace) -> None:
    for path, body, status in RATES:
        found, answer = ask(server.http, path, body)
        assert (found, answer == ZERO) == (status, status == 400), (path, body)


#: Triton 2.51's answers in this order: inferences of ``adds``, then a change or a read, then rate and count.
COUNTS: list[tuple[int, str, Any, str, str]] = [
    (0, WHOLE, {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "5"}, "1", "5"),
    (2, WHOLE, None, "1", "3"),
    (0, ADDS, None, "1", "3"),
    (0, WHOLE, {"trace_rate": "2"}, "2", "3"),
    (0, ADDS, {"trace_rate": "1"}, "1", "3"),
    (1, ADDS, None, "1", "2"),
    (0, WHOLE, None, "2", "3"),
    (6, ADDS, None, "1", "0"),
    (0, WHOLE, None, "2", "3"),
    (0, ADDS, {"trace_rate": None}, "2", "3"),
    (0, WHOLE, {"trace_level": None, "trace_rate": None, "trace_count": None}, "1000", "-1"),
]


def test_the_count_is_the_remaining_number_after_other_changes(server: Headrace) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    for inferences, path, change, rate, count in COUNTS:
        for _ in range(inferences):
            assert ask(server.http, "/v2/models/adds/infer", body)[0] == 200
        _, answer = ask(server.http, path, change)
        assert (answer["trace_rate"], answer["trace_count"]) == (rate, count), (path, change)


def test_the_stock_clients_read_and_change_settings(server: Headrace) -> None:
    wanted = {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as over_http:
        changed = over_http.update_trace_settings("adds", wanted)
        assert {name: changed[name] for name in wanted} == wanted
        assert over_http.get_trace_settings("adds") == changed
        assert over_http.get_trace_settings()["trace_rate"] == "1000"
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as over_grpc:
        assert over_grpc.get_trace_settings("adds", as_json=True)["settings"]["trace_rate"] == {"value": ["5"]}
        cleared = over_grpc.update_trace_settings("adds", {"trace_rate": None, "trace_level": None}, as_json=True)
        assert cleared["settings"]["trace_rate"] == {"value": ["1000"]}


def test_a_server_without_a_trace_file_is_an_error(serve: Callable[..., Headrace], models: Path) -> None:
    server = serve(f"--model-repository={models}")
    assert ask(server.http, "/v2/trace/setting", None) == (200, {**START, "trace_file": ""})
    answer = ask(server.http, "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
    assert answer == (400, {"error": "Attempting to set invalid trace setting :trace file name is not given"})
    assert ask(server.http, "/v2/trace/setting", {"trace_rate": "7"})[0] == 200


def test_a_change_reaches_all_workers(serve: Callable[..., Headrace], models: Path) -> None:
    server = serve(f"--model-repository={models}", "--workers=2", "--trace-config=mode=opentelemetry")
    server.wait_for_line("2 workers serve")
    for path, body in (
        ("/v2/trace/setting", {"trace_rate": "7"}),
        ("/v2/models/adds/trace/setting", {"trace_rate": "9"}),
    ):
        assert ask(server.http, path, body)[0] == 200
    for _ in range(20):  # each connection reaches one of the workers
        assert ask(server.http, "/v2/trace/setting", None)[1]["trace_rate"] == "7"
        assert ask(server.http, "/v2/models/adds/trace/setting", None)[1]["trace_rate"] == "9"


def test_no_caller_chooses_a_file(server: Headrace, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """docs/spec/security.md C5."""
    path = tmp_path / "chosen.json"
    for place in ("/v2/trace/setting", "/v2/models/adds/trace/setting"):
        for name in ("trace_file", "log_file", "file"):
            status, _ = ask(server.http, place, {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", name: str(path)})
            assert status == (501 if name == "trace_file" else 200)
    assert call(server.grpc, "adds", {"trace_file": [str(path)]})[0] == "UNIMPLEMENTED"
    written = counters(server)["headrace_trace_written_total"]
    infer_adds(server.http, 3)
    wait_until(lambda: counters(server)["headrace_trace_written_total"] == written + 3, "3 traces are written")
    assert not path.exists()


def test_settings_can_be_restricted(serve: Callable[..., Headrace], models: Path, trace_file: Path) -> None:
    server = serve(
        f"--model-repository={models}",
        f"--trace-config=triton,file={trace_file}",
        "--http-restricted-api=trace:who=me",
        "--grpc-restricted-protocol=trace:who=me",
    )
    for path in ("/v2/trace/setting", "/v2/models/adds/trace/setting"):
        for body in (None, {"trace_rate": "1"}):
            assert ask(server.http, path, body)[0] == 403
    assert call(server.grpc, "", {"trace_rate": ["1"]})[0] == "UNAVAILABLE"
