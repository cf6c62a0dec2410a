"""SageMaker's port: which model answers, what may be loaded, and who may ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace import BackendError, ConfigError, Engine, InvalidArgument
from headrace_cloud_routes import multi_model
from tests.frontends.cloud_routes.conftest import Serve
from tests.frontends.cloud_routes.recorded import BINARY, INFER, SAGEMAKER, Answer, ask, load


def post(port: int, path: str, body: str, **headers: str) -> Answer:
    return ask(port, {"method": "POST", "path": path, "headers": headers, "body": body})


def get(port: int, path: str) -> Answer:
    return ask(port, {"method": "GET", "path": path, "headers": {}, "body": ""})


@pytest.mark.parametrize("path", [
    "/../ml/abc/model", "/abc/../abc/model", "/../model", "/abc/model/..", "/abc/model/../../two/model", "/abc",
    "/abc/other",
    "/abc/model/sub/deep", "/abc/model\0", "//abc/model", "/abc/model/sub%2f..", "/abc%2f../model", "abc/model",
])  # fmt: skip
def test_no_directory_but_the_platforms_is_loaded(serve: Serve, shared: Path, path: str) -> None:
    port = serve()["sagemaker"]
    answer = post(port, "/models", load("a", f"{shared}{path}"))
    assert (answer.status, "is refused" in answer.answer) == (400, True)
    assert json.loads(get(port, "/models").answer) == {"models": []}


def test_no_link_leads_to_another_directory(serve: Serve, shared: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (shared / "abc").rename(outside)
    (shared / "abc").symlink_to(outside)
    (shared / "two/link").symlink_to(outside)
    (shared / "three").mkdir()
    (shared / "three/model").symlink_to(outside / "model")
    port = serve()["sagemaker"]
    for path in ("abc/model", "three/model"):
        answer = post(port, "/models", load("a", f"{shared}/{path}"))
        assert (answer.status, "by a link" in answer.answer) == (400, True), path


def test_a_link_in_a_model_that_leads_out_is_refused(serve: Serve, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (shared / "abc/model/1/labels.txt").symlink_to(tmp_path / "secret")
    answer = post(serve()["sagemaker"], "/models", load("a", f"{shared}/abc/model"))
    assert (answer.status, "leads out of the model repository" in answer.answer) == (400, True)


@pytest.mark.parametrize("name", ["", "..", "a/b", "../echo", " a", "a\0"])
def test_a_name_is_one_segment_of_a_path(serve: Serve, shared: Path, name: str) -> None:
    answer = post(serve()["sagemaker"], "/models", load(name, f"{shared}/abc/model"))
    assert (answer.status, "invalid model name" in answer.answer) == (400, True)


@pytest.mark.parametrize("body", ["", "x", "[]", "null", '{"model_name":1,"url":2}', "{" * 50_000])
def test_a_body_that_is_no_load_is_refused(serve: Serve, body: str) -> None:
    answer = post(serve()["sagemaker"], "/models", body)
    assert (answer.status, "error" in json.loads(answer.answer)) == (400, True)


def test_a_name_that_the_repository_has_is_not_loaded_again(serve: Serve, shared: Path) -> None:
    answer = post(serve()["sagemaker"], "/models", load("echo", f"{shared}/abc/model"))
    assert (answer.status, "conflicting mapping for 'echo'" in answer.answer) == (409, True)


def test_a_load_that_fails_leaves_nothing(serve: Serve, shared: Path) -> None:
    config = shared / "abc/model/config.pbtxt"
    good = config.read_text()
    config.write_text(good.replace("identity", "nowhere"))
    ports = serve()
    port = ports["sagemaker"]
    assert post(port, "/models", load("a", f"{shared}/abc/model")).status == 400
    assert get(port, "/models").answer == '{"models":[]}'
    assert get(port, "/ping").status == 200  # an endpoint stays in service
    config.write_text(good)
    assert post(port, "/models", load("a", f"{shared}/abc/model")).status == 200


def test_a_load_without_memory_is_answered_so_that_the_platform_unloads_others(
    serve: Serve, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Engine, name: str, parameters: Any = None) -> None:
        raise BackendError("CUDA out of memory. Tried to allocate 2.00 GiB")

    ports = serve()
    monkeypatch.setattr(Engine, "load", fails)
    assert post(ports["sagemaker"], "/models", load("a", f"{shared}/abc/model")).status == 507


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_loads_need_the_control_mode_explicit(serve: Serve, shared: Path, mode: str) -> None:
    answer = post(serve(mode=mode)["sagemaker"], "/models", load("a", f"{shared}/abc/model"))
    assert (answer.status, "model control mode is not EXPLICIT" in answer.answer) == (400, True)


def test_the_ensemble_of_a_directory_has_the_name_of_the_endpoint(shared: Path) -> None:
    root = shared / "ens/model"
    for name, config in {"first": "", "second": "", "all": 'platform: "ensemble"'}.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    found = multi_model.find_repository("hash", str(root))
    assert found == (str(root), {"first": "first", "second": "second", "hash": "all"})
    (root / "all/config.pbtxt").write_text("")
    assert multi_model.find_repository("first", str(root))[1] == {"first": "first", "second": "second", "all": "all"}
    with pytest.raises(InvalidArgument, match="no model of this name"):
        multi_model.find_repository("hash", str(root))


def test_a_model_of_versions_only_has_the_name_of_the_endpoint(shared: Path) -> None:
    (shared / "plain/model/1").mkdir(parents=True)
    assert multi_model.find_repository("hash", f"{shared}/plain/model/") == (f"{shared}/plain", {"hash": "model"})


def test_the_target_model_counts_if_it_is_served(serve: Serve, shared: Path) -> None:
    port = serve()["sagemaker"]
    assert post(port, "/models", load("a", f"{shared}/abc/model")).status == 200
    for target, model in {"echo": "echo", "resnet.tar.gz": "a", "": "a", "../echo": "a"}.items():
        answer = post(port, "/models/a/invoke", INFER, **{"X-Amzn-SageMaker-Target-Model": target})
        assert json.loads(answer.answer)["model_name"] == model, target


@pytest.mark.parametrize("host", ["native", "hypercorn"])
def test_generate_answers_if_the_environment_says_so(
    serve: Serve, shared: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    pytest.importorskip("headrace_generate")
    if host != "native":
        pytest.importorskip(f"headrace_{host}")
    (shared.parent / "models/flat/1").mkdir(parents=True)
    config = (shared.parent / "models/echo/config.pbtxt").read_text().replace("max_batch_size: 4", "")
    (shared.parent / "models/flat/config.pbtxt").write_text(config)
    monkeypatch.setenv("SAGEMAKER_TRITON_INFERENCE_TYPE", "generate_stream")
    monkeypatch.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "flat")
    port = serve("--load-model=flat", "--vertex-ai-default-model=echo", f"--http-server={host}")["sagemaker"]
    answer = post(port, "/invocations", '{"INPUT0":[1,2]}')
    assert answer.content_type.startswith("text/event-stream")
    assert answer.answer.startswith("data: {")


@pytest.mark.parametrize("variable", ["SAGEMAKER_TRITON_PING_MODE", "SAGEMAKER_TRITON_INFERENCE_TYPE"])
def test_an_unknown_value_of_the_environment_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "sometimes")
    with pytest.raises(ConfigError, match=f"{variable} is 'sometimes'; it must be one of"):
        serve()


def test_each_ping_mode_asks_its_probe(serve: Serve, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared.parent / "models/bad").mkdir()
    (shared.parent / "models/bad/config.pbtxt").write_text('backend: "nowhere"')
    (shared.parent / "models/bad/1").mkdir()
    more = ("--load-model=bad", "--exit-on-error=false", "--vertex-ai-default-model=echo")
    assert get(serve(*more)["sagemaker"], "/ping").status == 400
    monkeypatch.setenv("SAGEMAKER_TRITON_PING_MODE", "live")
    assert get(serve(*more)["sagemaker"], "/ping").status == 200


def test_restricted_operations_need_their_key_here_too(serve: Serve, shared: Path) -> None:
    port = serve("--http-restricted-api=inference,model-repository:key=secret")["sagemaker"]
    body = load("a", f"{shared}/abc/model")
    assert post(port, "/invocations", INFER).status == 403
    assert post(port, "/models", body).status == 403
    assert get(port, "/models").status == 403
    assert post(port, "/models", body, key="secret").status == 200
    assert ask(port, {"method": "DELETE", "path": "/models/a", "headers": {}, "body": ""}).status == 403
    assert post(port, "/models/a/invoke", INFER).status == 403
    assert post(port, "/models/a/invoke", INFER, key="secret").status == 200
    assert post(port, "/models/absent/invoke", INFER).status == 403
    assert post(port, "/models/absent/invoke", INFER, key="secret").status == 404
    assert get(port, "/ping").status == 200


def test_only_binary_tensors_may_be_larger_than_the_limit_of_json(serve: Serve) -> None:
    port = serve("--http-max-input-size=610")["sagemaker"]
    big = INFER[:-1] + "," + json.dumps("x" * 700) + ":1}"
    refused = post(port, "/invocations", big)
    assert (refused.status, "exceeds the maximum" in refused.answer) == (400, True)
    length = BINARY.index("\0")
    head = json.loads(BINARY[:length])
    rows = 4
    head["inputs"][0] |= {"shape": [rows, 2], "parameters": {"binary_data_size": rows * 8}}
    del head["outputs"]
    text = json.dumps(head)
    padded = text + " " * (600 - len(text))
    answer = post(
        port, "/invocations", padded + "\0" * rows * 8, **{"Content-Type": f"{SAGEMAKER};json-header-size=600"}
    )
    assert answer.status == 200, answer


def test_a_caller_that_leaves_does_not_stop_a_load(serve: Serve, shared: Path) -> None:
    port = serve()["sagemaker"]

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = load("a", f"{shared}/abc/model").encode()
        writer.write(b"POST /models HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.transport.abort()
        while (await asyncio.to_thread(get, port, "/models/a")).status != 200:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(leave(), 20))


def test_the_list_has_a_slash_at_its_end_or_none(serve: Serve, shared: Path) -> None:
    """As Triton 2.51 answers; behind a name there is no slash."""
    port = serve()["sagemaker"]
    assert post(port, "/models/", load("a", f"{shared}/abc/model")).status == 200
    for path in ("/models", "/models/"):
        assert [each["modelName"] for each in json.loads(get(port, path).answer)["models"]] == ["a"]
    assert [get(port, path).status for path in ("/models//", "/models/a/", "/ping/")] == [400] * 3
