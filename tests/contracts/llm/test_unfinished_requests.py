"""Tokens of requests whose caller leaves before the end: charged to the quota of its key, over every protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from tests.interceptors.access.access_files import make

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: The words of a prompt, which is one token each, and the tokens that a key may have. The engine writes one in 1 ms.
PROMPT, QUOTA = 3000, 2500
TEXT = " ".join(["word"] * PROMPT)
#: For hours.
SAMPLING = json.dumps({"max_tokens": 10**6})
#: Requests of one token each, while what was used is not reported yet.
MOST_ASKED = 300


def leave_generate(server: Headrace, model: str, key: str, stream: bool = False) -> None:
    path = f"/v2/models/{model}/{'generate_stream' if stream else 'generate'}"
    leave(server, model, key, path, {"text_input": TEXT, "stream": stream, "sampling_parameters": SAMPLING})


def leave_generate_stream(server: Headrace, model: str, key: str) -> None:
    leave_generate(server, model, key, stream=True)


def leave_completion(server: Headrace, model: str, key: str, stream: bool = False) -> None:
    leave(
        server, model, key, "/v1/completions", {"model": model, "prompt": TEXT, "max_tokens": 10**6, "stream": stream}
    )


def leave_completion_stream(server: Headrace, model: str, key: str) -> None:
    leave_completion(server, model, key, stream=True)


def leave(server: Headrace, model: str, key: str, path: str, body: Any) -> None:
    """Post ``body``, and disconnect when the engine has the request, without reading."""
    with closing(HTTPConnection("127.0.0.1", server.http, timeout=20)) as connection:
        connection.request("POST", path, json.dumps(body), headers_of(key))
        server.wait_until_metric("nv_llm_streams", model, 1)


def leave_grpc(server: Headrace, model: str, key: str, stream: bool = False) -> None:
    inputs = []
    for name, value in {"text_input": TEXT, "stream": stream, "sampling_parameters": SAMPLING}.items():
        is_text = isinstance(value, str)
        each = InferInput(name, [1], "BYTES" if is_text else "BOOL")
        each.set_data_from_numpy(np.array([value], np.object_ if is_text else np.bool_))
        inputs.append(each)
    with InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: None, headers=headers_of(key))
        client.async_stream_infer(model, inputs)
        server.wait_until_metric("nv_llm_streams", model, 1)
        client.stop_stream(cancel_requests=True)


def leave_grpc_stream(server: Headrace, model: str, key: str) -> None:
    leave_grpc(server, model, key, stream=True)


def leave_prefill(server: Headrace, model: str, key: str) -> None:
    """Disconnect before the first token."""
    leave(server, model, key, f"/v2/models/{model}/generate", {"text_input": f"prefill {TEXT}", "stream": False})


def expire(server: Headrace, model: str, key: str) -> None:
    body = {"text_input": TEXT, "stream": False, "timeout": 400_000, "sampling_parameters": SAMPLING}
    answer = httpx.post(f"http://127.0.0.1:{server.http}/v2/models/{model}/generate", json=body,
                        headers=headers_of(key), timeout=20)  # fmt: skip
    assert (answer.status_code, answer.json()) == (503, {"error": "Request timeout expired"})


def headers_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


WAYS = [leave_generate, leave_generate_stream, leave_completion, leave_completion_stream, leave_grpc, leave_grpc_stream,
        leave_prefill, expire]  # fmt: skip
CASES = list(product(("thread", "process"), WAYS))


def name_of(model: str, way: Callable[..., None]) -> str:
    return f"{model}-{way.__name__}"


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], install_echo: Callable[..., Path], keys: dict[str, str],
           tmp_path_factory: pytest.TempPathFactory) -> Headrace:  # fmt: skip
    site = install_echo(tmp_path_factory.mktemp("unfinished"))
    rules = [{"models": ["*"], "operations": ["inference"]}]
    keys.update(make(site / "access.json", **{name_of(*case): rules for case in CASES}, patient=rules))
    quota = {"output_tokens_per_minute": 1, "output_tokens_burst": QUOTA}
    (site / "quotas.json").write_text(json.dumps({"defaults": quota}))
    words = (
        f"--model-repository={site / 'models'}",
        f"--access-keys={site / 'access.json'}",
        f"--quota-file={site / 'quotas.json'}",
        "--access-open=health,metrics",
    )
    return keep_serving(*words, environ={"PYTHONPATH": str(site)})


def status(server: Headrace, model: str, key: str, text: str = "a") -> int:
    """Return the status of a small request."""
    body = {"text_input": text, "stream": False, "sampling_parameters": '{"max_tokens": 1}'}
    url = f"http://127.0.0.1:{server.http}/v2/models/{model}/generate"
    return httpx.post(url, json=body, headers=headers_of(key)).status_code


@pytest.mark.parametrize(("model", "way"), CASES)
def test_who_leaves_pays_for_the_prompt_and_for_what_was_written(
    server: Headrace, keys: dict[str, str], model: str, way: Callable[..., None],
    wait_until: Callable[[Callable[[], bool], str], None],
) -> None:  # fmt: skip
    key = keys[name_of(model, way)]
    assert status(server, model, key) == 200
    server.wait_until_metric("nv_llm_streams", model, 0)  # those of another test have ended
    way(server, model, key)
    asked = []

    def is_refused() -> bool:
        asked.append(status(server, model, key))
        return len(asked) == MOST_ASKED or asked[-1] == 429

    wait_until(is_refused, "the prompt is charged")
    assert asked[-1] == 429


def test_who_stays_pays_for_what_was_written_only(server: Headrace, keys: dict[str, str]) -> None:
    assert [status(server, "thread", keys["patient"], TEXT) for _ in range(4)] == [200] * 4
