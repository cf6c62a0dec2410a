"""The logging extension: a real Triton's answers over both protocols, and what the log has afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from headrace import grpc_service_pb2 as pb
from headrace_testing import ExtensionConformance, ServedExtension
from headrace_testing.serving import serve as serve_here
from tests.e2e.lines import Lines

if TYPE_CHECKING:
    from tests.conftest import Headrace

START = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip
CONFIG = """backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
BOOLEAN = "attempt to access JSON non-boolean as boolean"
UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_FILE = "log file location can not be updated through network protocol"


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_logging", "logging"

    def ask(self, served: ServedExtension) -> None:
        status, _, _ = served.http("GET", "/v2/logging")
        assert status == 501, "the test has configured logging itself"


@pytest.fixture
def server(serve: Callable[..., Headrace], tmp_path: Path) -> Headrace:
    (tmp_path / "models").mkdir()
    return serve(f"--model-repository={tmp_path / 'models'}")


def post(port: int, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(f"http://127.0.0.1:{port}/v2/logging", content=content)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


#: Triton 2.51's answers in this order. For an accepted change: the settings that then differ from the start.
RECORDED: list[tuple[Any, int, Any]] = [
    ({}, 200, {}),
    ({"log_info": False}, 200, {"log_info": False}),
    ({"log_info": "x"}, 500, BOOLEAN),
    ({"log_info": 1}, 500, BOOLEAN),
    ({"log_verbose_level": 2}, 200, {"log_info": False, "log_verbose_level": 2}),
    ({"log_verbose_level": -1}, 500, UNSIGNED),
    ({"log_verbose_level": 1.5}, 500, UNSIGNED),
    ({"log_verbose_level": "1"}, 500, UNSIGNED),
    ({"log_verbose_level": True}, 500, UNSIGNED),
    ({"log_format": "ISO8601"}, 200, {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}),
    ({"log_format": "iso"}, 503, "invalid argument for --log_format, got: iso"),
    ({"log_format": "json"}, 503, "invalid argument for --log_format, got: json"),
    ({"log_format": 5}, 500, "attempt to access JSON non-string as string"),
    ({"log_format": "default"}, 200, {"log_info": False, "log_verbose_level": 2}),
    ({"log_file": "x"}, 501, NO_FILE),
    ({"log_file": ""}, 501, NO_FILE),
    ({"log_file": 5}, 501, NO_FILE),
    ({"log_file": None}, 200, {"log_info": False, "log_verbose_level": 2}),
    ({"what": 1}, 200, {"log_info": False, "log_verbose_level": 2}),
    ({"log_warning": False, "log_format": "bad"}, 503, "invalid argument for --log_format, got: bad"),
    ("[]", 200, {"log_info": False, "log_verbose_level": 2}),
    ("5", 200, {"log_info": False, "log_verbose_level": 2}),
    ("", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
    ({"log_info": True, "log_verbose_level": 0}, 200, {}),
]


def test_answers_over_http_equal_tritons(server: Headrace) -> None:
    headrace, start = server, START
    assert httpx.get(f"http://127.0.0.1:{headrace.http}/v2/logging").json() == start
    for body, status, answer in RECORDED:
        wanted = start | answer if status == 200 else {"error": answer}
        assert post(headrace.http, body) == (status, wanted), body
    assert httpx.put(f"http://127.0.0.1:{headrace.http}/v2/logging", json={}).status_code == 405
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{headrace.http}")
    assert client.update_log_settings({"log_verbose_level": 1}) == start | {"log_verbose_level": 1}
    assert client.get_log_settings() == start | {"log_verbose_level": 1}


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"log_info": {"string_param": "x"}}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_info": {"uint32_param": 1}}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_info": {}}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_verbose_level": {"bool_param": True}}, "INVALID_ARGUMENT", "expect int32 for 'log_verbose_level'"),
        ({"log_format": {"bool_param": True}}, "INVALID_ARGUMENT", "expect string for 'log_format'"),
        ({"log_format": {"string_param": "x"}}, "INVALID_ARGUMENT", "invalid argument for log_format, got: x"),
        ({"log_file": {"string_param": "x"}}, "UNIMPLEMENTED", NO_FILE),
        ({"log_file": {"string_param": ""}}, "UNIMPLEMENTED", NO_FILE),
        ({"log_info": {"bool_param": False}, "log_format": {"string_param": "x"}}, "INVALID_ARGUMENT", "got: x"),
    ],
)
def test_refusals_over_grpc_equal_tritons_and_change_nothing(
    server: Headrace, settings: dict[str, Any], code: str, text: str
) -> None:
    request = pb.LogSettingsRequest(
        settings={name: pb.LogSettingsRequest.SettingValue(**value) for name, value in settings.items()}
    )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/LogSettings",
            pb.LogSettingsRequest.SerializeToString,
            pb.LogSettingsResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refusal:
            call(request, timeout=20)
        assert refusal.value.code().name == code
        assert text in str(refusal.value.details())
        unchanged = call(pb.LogSettingsRequest(), timeout=20)
    assert unchanged.settings["log_info"].bool_param


def test_the_log_follows_its_settings(
    serve: Callable[..., Headrace], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    for name in ("first", "second", "third", "fourth", "fifth"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
    server = serve(f"--model-repository={tmp_path}", "--model-control-mode=explicit")
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")

    def lines_about(model: str, last: str) -> list[str]:
        client.load_model(model)
        wait_until(lambda: any(model in line and last in line for line in server.lines), f"{last} {model}")
        return [line for line in server.lines if model in line]

    assert all(re.match(r"I\d{4} ", line) for line in lines_about("first", "successfully loaded"))
    client.update_log_settings({"log_format": "ISO8601"})
    assert all(re.match(r"\d{4}-\d\d-\d\dT", line) for line in lines_about("second", "successfully loaded"))
    client.update_log_settings({"log_info": False})
    client.load_model("third")
    client.update_log_settings({"log_info": True, "log_format": "default"})
    few = len(lines_about("fourth", "successfully loaded"))
    client.update_log_settings({"log_verbose_level": 2})
    assert len(lines_about("fifth", "successfully loaded")) > few, "verbose lines are written as well"
    assert not [line for line in server.lines if "third" in line]


@pytest.mark.parametrize("hosts", [(), ("--http-server=hypercorn", "--grpc-server=grpcio")], ids=["native", "others"])
def test_lines_about_requests_follow_the_level_on_open_connections(
    serve: Callable[..., Headrace], tmp_path: Path, wait_until: Callable[..., None], hosts: tuple[str, ...]
) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    server = serve(f"--model-repository={tmp_path}", *hosts)
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    tensor = tritonclient.grpc.InferInput("x", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    words = ("HTTP request: 2 /v2/models/m/infer", "New request handler for ModelInferHandler", "ModelReady")

    with (
        httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as http,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client,
    ):

        def ask() -> None:
            assert http.post("/v2/models/m/infer", json=body).status_code == 200
            client.infer("m", [tensor])
            assert client.is_model_ready("m")

        ask()
        assert not [line for line in server.lines if any(word in line for word in words)]
        client.update_log_settings({"log_verbose_level": 1})
        ask()
        for word in words:
            wait_until(lambda word=word: any(word in line for line in server.lines), word)
        wait_until(lambda: any("Done for ModelReady, 0" in line for line in server.lines), "the last line")
        client.update_log_settings({"log_verbose_level": 0})
        count = len(server.lines)
        ask()
        client.update_log_settings({"log_verbose_level": 1})
        ask()
        wait_until(lambda: sum(words[0] in line for line in server.lines) == 2, "the line of the third request")
        shown = [line for line in server.lines[count:] if words[0] in line]
        assert len(shown) == 1, "no line for the second"


def test_with_workers_a_change_reaches_all_and_later_ones(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    server = serve(f"--model-repository={tmp_path / 'models'}", "--workers=2")
    server.wait_for_line("2 workers serve")
    with contextlib.closing(Lines(server, "worker")) as lines:
        first, second = lines.one_each()
        first.http.request("POST", "/v2/logging", json.dumps({"log_verbose_level": 3, "log_info": True}))
        assert json.loads(first.http.getresponse().read())["log_verbose_level"] == 3
        assert second.get("/v2/logging")[1]["log_verbose_level"] == 3
        second.http.request("POST", "/v2/logging", json.dumps({"log_verbose_level": 2, "log_format": "no"}))
        assert second.http.getresponse().status == 503
        os.kill(first.owner, signal.SIGKILL)
        server.wait_for_line("worker 0 has been restarted")
        settings = [line.get("/v2/logging")[1] for line in lines.one_each()]
    assert settings == [START | {"log_verbose_level": 3}] * 2


def test_a_stranger_writes_no_file(server: Headrace, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert post(server.http, {"log_file": str(tmp_path / "new"), "log_info": False})[0] == 501
    assert sorted(tmp_path.iterdir()) == before
    assert httpx.get(f"http://127.0.0.1:{server.http}/v2/logging").json()["log_info"]


def test_a_program_with_its_own_logging_is_not_changed(tmp_path: Path) -> None:
    with serve_here(tmp_path, listen=True) as server:
        answer = httpx.get(f"http://127.0.0.1:{server.options.http_port}/v2/logging")
    assert (answer.status_code, "another program" in answer.text) == (501, True)
