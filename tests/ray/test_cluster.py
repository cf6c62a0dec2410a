"""A real Ray of two nodes on this machine. Session `ray` of the noxfile, because it takes two minutes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

ray = pytest.importorskip("ray", reason="session ray has it")

from ray import serve  # noqa: E402
from ray._private.state import actors  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import headrace_ray  # noqa: E402
from headrace import NotFound  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).parents[2] / "examples"
PORT = 18765
URL = f"127.0.0.1:{PORT}"
DEADLINE_S = 60
CONFIG = """
backend: "identity"
input {{ name: "x" data_type: TYPE_FP32 dims: [2] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [2] }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }}
"""


def wait_until(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(EXAMPLES / "models/digits", folder / "digits")
    shutil.copytree(EXAMPLES / "stream/models", folder, dirs_exist_ok=True)
    for name, delay in (("identity", 0), ("slow", 300)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(delay))
    return folder


@pytest.fixture(scope="module")
def handle(cluster: Cluster, repository: Path) -> Any:
    """Two replicas, on two nodes."""
    application = headrace_ray.deployment(repository, num_replicas=2, max_replicas_per_node=1)
    return serve.run(application, name="models", route_prefix="/")


def replicas(application: str) -> dict[int, str]:
    """Return the node of each replica, by the number of its process."""
    return {
        each["Pid"]: each["Address"]["NodeID"]
        for each in actors().values()
        if each["State"] == "ALIVE" and each["Name"].startswith(f"SERVE_REPLICA::{application}#")
    }


@pytest.fixture
def client(handle: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(URL) as client:
        yield client


def tensor(name: str, value: Any, kind: str) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), kind)
    made.set_data_from_numpy(value)
    return made


IMAGE = np.random.default_rng(0).integers(0, 17, (3, 8, 8)).astype(np.uint8)
X = np.array([1, 2], np.float32)


def expected() -> Any:
    session = onnxruntime.InferenceSession(EXAMPLES / "models/digits/1/model.onnx")
    return session.run(["probabilities"], {"image": IMAGE})[0]


def test_each_node_has_a_replica(handle: Any) -> None:
    assert len(replicas("models")) == len(set(replicas("models").values())) == 2


def test_the_stock_client_gets_the_models_outputs_through_rays_proxy(client: triton.InferenceServerClient) -> None:
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.get_model_metadata("digits")["inputs"][0]["name"] == "image"
    for _ in range(4):
        answer = client.infer("digits", [tensor("image", IMAGE, "UINT8")]).as_numpy("probabilities")
        np.testing.assert_allclose(answer, expected(), rtol=1e-5)
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing'"):
        client.infer("nothing", [tensor("x", X, "FP32")])


def test_a_handle_takes_arrays_and_returns_arrays(handle: Any) -> None:
    answer = handle.infer.remote("digits", {"image": IMAGE}).result(timeout_s=DEADLINE_S)
    np.testing.assert_allclose(answer["probabilities"], expected(), rtol=1e-5)
    with pytest.raises(NotFound, match="unknown model: 'nothing'"):
        handle.infer.remote("nothing", {"x": X}).result(timeout_s=DEADLINE_S)


def test_a_decoupled_model_streams_to_a_handle_and_over_http(handle: Any) -> None:
    inputs = {"prompt": [b"Once"], "words": np.array([5], np.int32), "seed": np.array([1], np.int32)}
    streamed = [each["word"][0] for each in handle.options(stream=True).stream.remote("story", inputs)]
    assert len(streamed) == 5
    question, times, words = {"prompt": "Once", "words": 5, "seed": 1}, [], []
    with httpx.stream("POST", f"http://{URL}/v2/models/story/generate_stream", json=question) as stream:
        for line in stream.iter_lines():
            if line:
                words.append(json.loads(line.removeprefix("data: "))["word"].encode())
                times.append(time.monotonic())
    assert words == streamed
    assert times[-1] - times[0] > 0.05, "each is sent when it is there"


def test_a_killed_replica_loses_only_its_own_requests(handle: Any) -> None:
    """Ray starts another one. A client that sends again gets an answer."""
    done, failed, lock, stop = [], [], threading.Lock(), threading.Event()

    def ask() -> None:
        with triton.InferenceServerClient(URL, network_timeout=DEADLINE_S) as client:
            while not stop.is_set():
                try:
                    answer = client.infer("identity", [tensor("x", X, "FP32")]).as_numpy("y")
                    assert (answer == X).all()
                    done.append(time.monotonic())
                except Exception as error:
                    with lock:
                        failed.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(done) > 100, "requests are answered")
    before = replicas("models")
    running = [handle.infer.remote("slow", {"x": X}) for _ in range(16)]
    threading.Event().wait(0.2)  # until they are in the replicas
    os.kill(next(iter(before)), signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: len(replicas("models").keys() - before.keys()) == 1, "another replica")
    restarted = time.monotonic()
    count = len(done)
    wait_until(lambda: len(done) > count + 100, "requests are answered again")
    stop.set()
    for thread in threads:
        thread.join()
    lost = 0
    for each in running:
        try:
            assert (each.result(timeout_s=DEADLINE_S)["y"] == X).all()
        except ray.exceptions.RayActorError:
            lost += 1
    print(f"of 16 calls by handle {lost} are lost")
    assert 0 < lost < 16
    print(f"{len(done)} answered, {len(failed)} failed, a new replica after {restarted - killed:.1f} s; {failed[:1]!s}")
    assert len(failed) <= 2 * len(threads)
    assert any(killed < at < restarted for at in done), "the other replica answers meanwhile"


def test_a_replica_keeps_the_models_that_were_used_last(cluster: Cluster, repository: Path) -> None:
    application = headrace_ray.deployment(repository, models_per_replica=1, name="many")
    handle = serve.run(application, name="many", route_prefix="/many")
    url = f"http://{URL}/many/v2"

    def loaded() -> set[str]:
        return {each["name"] for each in httpx.post(f"{url}/repository/index", json={"ready": True}).json()}

    assert loaded() == set()
    for name in ("identity", "digits", "identity"):
        headers = {"serve_multiplexed_model_id": name}
        assert httpx.get(f"{url}/models/{name}/ready", headers=headers).status_code == 200
        assert loaded() == {name}
    assert httpx.get(f"{url}/models/digits/ready").status_code == 200, "without the header, by the path"
    assert loaded() == {"digits"}
    answer = handle.options(multiplexed_model_id="identity").infer.remote("identity", {"x": X}).result()
    assert (answer["y"] == X).all()
    assert httpx.get(f"{url}/models/nothing/ready").status_code == 404
    serve.delete("many")


def test_the_queue_adds_replicas(cluster: Cluster, repository: Path) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5,
        "metrics_interval_s": 0.2, "look_back_period_s": 1,
    }  # fmt: skip
    application = headrace_ray.deployment(repository, name="scaled", autoscaling_config=scaling)
    handle = serve.run(application, name="scaled", route_prefix="/scaled")
    assert len(replicas("scaled")) == 1
    waiting = [handle.infer.remote("slow", {"x": X}) for _ in range(60)]
    wait_until(lambda: len(replicas("scaled")) == 2, "a second replica")
    assert all((each.result()["y"] == X).all() for each in waiting)
    serve.delete("scaled")


def test_the_command_deploys(cluster: Cluster, repository: Path) -> None:
    """In a process of its own: one that has joined a cluster joins no other."""
    flags = (f"--model-repository={repository}", f"--address={cluster.address}", "--name=c", "--route-prefix=/c")
    headrace = Path(sys.executable).with_name("headrace")
    done = subprocess.run(
        [headrace, "ray", *flags, "--", "--id=by-command"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "'c' serves on the HTTP ports of the cluster, at /c\n"), done.stderr
    assert httpx.get(f"http://{URL}/c/v2").json()["name"] == "by-command"
    serve.delete("c")


def test_rays_dashboard_shows_the_replicas(cluster: Cluster, handle: Any) -> None:
    page = httpx.get(f"http://{cluster.head_node.webui_url}/api/serve/applications/")
    assert page.status_code == 200, page.text
    shown = page.json()["applications"]["models"]["deployments"]["headrace"]
    assert shown["status"] == "HEALTHY"
    assert {each["pid"] for each in shown["replicas"]} == replicas("models").keys()


def test_ray_exports_the_metrics_of_the_replicas(handle: Any, client: triton.InferenceServerClient) -> None:
    client.infer("identity", [tensor("x", X, "FP32")])
    ports = [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]

    def lines() -> list[str]:
        pages = [httpx.get(f"http://127.0.0.1:{port}/metrics").text for port in ports]
        return [
            line for page in pages for line in page.splitlines() if line.startswith("ray_nv_inference_request_succ")
        ]

    wait_until(lambda: any('model="identity"' in line for line in lines()), "the metrics")
    (line, *_) = [line for line in lines() if 'model="identity"' in line and 'application="models"' in line]
    assert 'deployment="headrace"' in line
    assert 'replica="' in line
