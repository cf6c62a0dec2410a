"""Plans behind real ``headrace serve`` processes with two GPUs of the stand-in, and the stock client."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as grpc_client
from tritonclient import http as http_client
from tritonclient.utils import InferenceServerException

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def environ(standins: Path) -> Mapping[str, str]:
    """Return the environment of a machine with TensorRT and two GPUs, made of stand-ins."""
    return {
        "PYTHONPATH": os.pathsep.join([str(standins), os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": str(standins),
        "STANDIN_GPUS": "2",
    }


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> str:
    return f'parameters {{ key: "isolation" value {{ string_value: "{request.param}" }} }}'


@pytest.fixture
def server(plans: Any, step: Any, serve: Start, environ: Mapping[str, str], isolation: str) -> Any:
    configs = {
        "bare": isolation,
        "placed": f"{isolation} instance_group {{ count: 2 gpus: [ 0, 1 ] }}",
        "second": f"{isolation} instance_group {{ gpus: 1 }} optimization {{ cuda {{ graphs: true }} }}",
        "absent": "instance_group { gpus: 7 }",
        "broken": isolation,
    }
    for name, config in configs.items():
        plans.add(name)
        (plans.root / name / "config.pbtxt").write_text(config)
    (plans.root / "broken" / "1" / "model.plan").write_bytes(b"no plan")
    profile = {"x": [[1, 1], [2, 1], [4, 1]], "s": [[2]] * 3, "s.values": [[1, 1], [2, 2], [4, 5]]}
    plans.write(
        {"x": ("FLOAT", (-1, 1)), "s": ("INT32", (2,))}, {"y": ("FLOAT", (-1, -1))},
        [step("broadcast", ["x", "s"], "y")], [profile], name="wide", tensors={"s": {"is_shape": True}},
    )  # fmt: skip
    delay = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 1000000 }"
    (plans.root / "wide" / "config.pbtxt").write_text(f"{isolation} {delay}")
    return serve(
        f"--model-repository={plans.root}", "--exit-on-error=false", "--strict-readiness=false", environ=environ
    )


def ask(client: Any, tools: Any, model: str, inputs: Mapping[str, Any], outputs: list[str]) -> dict[str, Any]:
    tensors = []
    for name, array in inputs.items():
        tensor = tools.InferInput(name, array.shape, "FP32" if array.dtype == np.float32 else "INT32")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    answer = client.infer(model, tensors, outputs=[tools.InferRequestedOutput(name) for name in outputs])
    return {name: answer.as_numpy(name) for name in outputs}


def test_plans_are_served_over_http_and_grpc_on_their_gpus(server: Any, pair: Any, isolation: str) -> None:
    a, b = pair
    with (
        http_client.InferenceServerClient(f"127.0.0.1:{server.http}") as http,
        grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as grpc,
    ):
        for model in ("bare", "placed", "second"):
            for client, tools in ((http, http_client), (grpc, grpc_client)):
                for _ in range(4):
                    outputs = ask(client, tools, model, {"A": a, "B": b}, ["S", "D"])
                    np.testing.assert_array_equal(outputs["S"], a + b)
                    np.testing.assert_array_equal(outputs["D"], a - b)
        with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
            ask(http, http_client, "bare", {"A": np.tile(a, (3, 1)), "B": np.tile(b, (3, 1))}, ["S"])
        config = http.get_model_config("bare")
    assert (config["max_batch_size"], config["backend"], config["platform"]) == (8, "tensorrt", "tensorrt_plan")
    groups = [(group["kind"], group["gpus"], group["count"]) for group in config["instance_group"]]
    assert groups == [("KIND_GPU", [0, 1], 1)]
    if "thread" in isolation:  # the log of a model's process is its own
        created = set(re.findall(r"Created instance (\w+) on GPU (\d)", server.log))
        placed = {("placed_0_0", "0"), ("placed_0_1", "0"), ("placed_0_2", "1"), ("placed_0_3", "1")}
        assert created >= placed | {("bare_0", "0"), ("bare_1", "1"), ("second_0_0", "1")}
    reasons = _reasons(server)
    assert "Serialization (magic tag)" in reasons["broken"]
    assert "specifies invalid or unsupported gpu id 7" in reasons["absent"]


def test_requests_with_the_same_values_of_a_shape_tensor_run_together_and_others_apart(server: Any) -> None:
    """Four callers at once: three request rows of 3, and the fourth of 5."""
    with http_client.InferenceServerClient(f"127.0.0.1:{server.http}", concurrency=4) as client:
        waiting = []
        for number, width in enumerate((3, 5, 3, 3)):
            x = http_client.InferInput("x", [1, 1], "FP32")
            x.set_data_from_numpy(np.array([[number]], np.float32))
            s = http_client.InferInput("s", [1], "INT32")
            s.set_data_from_numpy(np.array([width], np.int32))
            waiting.append((number, width, client.async_infer("wide", [x, s])))
        for number, width, answer in waiting:
            np.testing.assert_array_equal(answer.get_result().as_numpy("y"), np.full((1, width), number, np.float32))
        statistics = client.get_inference_statistics("wide")["model_stats"][0]
    assert statistics["inference_count"] == 4
    assert statistics["execution_count"] < 4


def test_a_full_gpu_gets_no_further_model(plans: Any, serve: Start, environ: Mapping[str, str], pair: Any) -> None:
    for gpu in (0, 1):
        (plans.add(f"on{gpu}").parent / "config.pbtxt").write_text(f"instance_group {{ gpus: {gpu} }}")
    limits = ["--model-load-gpu-limit=0:0.8", "--model-load-gpu-limit=1:0.8"]
    server = serve(
        f"--model-repository={plans.root}", "--exit-on-error=false", "--strict-readiness=false", *limits,
        environ={**environ, "STANDIN_USED_PERCENT": "90 10"},
    )  # fmt: skip
    message = "memory limit set for GPU 0 has exceeded, model loading is rejected."
    assert _reasons(server) == {"on0": f"Unavailable: can not create model 'on0_0_0': {message}", "on1": ""}
    with http_client.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        outputs = ask(client, http_client, "on1", {"A": pair[0], "B": pair[1]}, ["S"])
    np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])


def _reasons(server: Any) -> dict[str, str]:
    with http_client.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        return {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}
