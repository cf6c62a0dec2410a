"""KServe's own SDK: its client and its types of the Open Inference Protocol against a real server, and its types of
Kubernetes objects against the manifests. Session `kserve` of the noxfile, because the SDK needs an old psutil."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

kserve = pytest.importorskip("kserve", reason="session kserve has it")

import grpc  # noqa: E402
import httpx  # noqa: E402
import kubernetes.client  # noqa: E402
import yaml  # noqa: E402
from kserve.api_client import ApiClient  # noqa: E402
from kserve.inference_client import RESTConfig  # noqa: E402
from kserve.protocol.rest import v2_datamodels as v2  # noqa: E402

if TYPE_CHECKING:
    from tests.conftest import Headrace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
MANIFESTS = Path(__file__).parents[2] / "deploy/kserve"
#: The headers of requests to the health routes.
JSON = {"Accept": "application/json"}
TENSOR = '{{ name: "{}" data_type: TYPE_{} dims: [ -1, 2 ] }}'
#: One input of each kind that client and server treat separately.
VALUES: dict[str, npt.NDArray[Any]] = {
    "FP32": np.array([[0.5, -1.25], [3e38, 0]], np.float32),
    "INT64": np.array([[2**62, -1]], np.int64),
    "BOOL": np.array([[True, False]]),
    "BYTES": np.array([[b"a", "ü".encode()]], object),
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / name).read_text(encoding="utf-8"))
    return found


def container() -> dict[str, Any]:
    (found,) = read("cluster-serving-runtime.yaml")["spec"]["containers"]
    return dict(found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]) -> Headrace:
    """Return the command of the runtime for an InferenceService ``digits`` with one model."""
    mounted = tmp_path_factory.mktemp("mnt") / "models"
    (mounted / "1").mkdir(parents=True)
    config = 'name: "what KServe does not know"\nbackend: "identity"\n'
    for name in VALUES:
        kind = "STRING" if name == "BYTES" else name
        config += f"input {TENSOR.format(name, kind)}\noutput {TENSOR.format('OUT_' + name, kind)}\n"
    (mounted / "config.pbtxt").write_text(config)
    program, command, *flags = container()["args"]
    assert (program, command) == ("headrace", "serve")
    words = [flag.replace("/mnt/models", str(mounted)).replace("{{.Name}}", "digits") for flag in flags]
    return keep_serving(*[word for word in words if not word.endswith(("=8080", "=9000"))])


def request(binary: bool) -> Any:
    inputs = []
    for name, value in VALUES.items():
        each = kserve.InferInput(name, list(value.shape), name)
        each.set_data_from_numpy(value, binary_data=binary)
        inputs.append(each)
    return kserve.InferRequest("digits", inputs, request_id="42")


def check(response: Any) -> None:
    assert (response.model_name, response.id) == ("digits", "42")
    for output in response.outputs:
        expected = VALUES[output.name.removeprefix("OUT_")]
        found = output.as_numpy()
        if expected.dtype == object:
            found = np.array([each if isinstance(each, bytes) else each.encode() for each in found.flat])
            expected = expected.ravel()
        np.testing.assert_array_equal(found, expected)
    assert {output.name for output in response.outputs} == {f"OUT_{name}" for name in VALUES}


@pytest.mark.parametrize("binary", [False, True])
def test_the_rest_client_gets_what_the_model_computes(server: Headrace, binary: bool) -> None:
    async def ask() -> Any:
        client = kserve.InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        url = f"http://127.0.0.1:{server.http}"
        try:
            assert await client.is_server_live(url, headers=JSON)
            assert await client.is_server_ready(url, headers=JSON)
            assert await client.is_model_ready(url, "digits", headers=JSON)
            with pytest.raises(httpx.HTTPStatusError, match="unknown model: 'nothing'"):
                await client.infer(url, request(binary), model_name="nothing")
            return await client.infer(url, request(binary), model_name="digits")
        finally:
            await client.close()

    check(asyncio.run(ask()))


def test_the_grpc_client_gets_what_the_model_computes(server: Headrace) -> None:
    async def ask() -> Any:
        async with kserve.InferenceGRPCClient(f"127.0.0.1:{server.grpc}", retries=0) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("digits")
            assert not await client.is_model_ready("nothing")
            wrong = request(binary=True)
            wrong.model_name = "nothing"
            with pytest.raises(grpc.RpcError, match="unknown model: 'nothing'"):
                await client.infer(wrong)
            return await client.infer(request(binary=True))

    check(asyncio.run(ask()))


def ask(server: Headrace, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=10)
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body), JSON)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v2", v2.ServerMetadataResponse),
        ("/v2/health/live", v2.ServerLiveResponse),
        ("/v2/health/ready", v2.ServerReadyResponse),
        ("/v2/models/digits", v2.ModelMetadataResponse),
        ("/v2/models/digits/ready", v2.ModelReadyResponse),
        ("/v2/models/digits/versions/1/ready", v2.ModelReadyResponse),
    ],
)
def test_documents_are_those_of_the_open_inference_protocol(server: Headrace, path: str, kind: Any) -> None:
    answer = ask(server, path)
    assert kind.model_validate(answer, strict=True).model_dump(exclude_unset=True) == answer


def test_requests_and_responses_follow_the_protocol(server: Headrace) -> None:
    inputs = [
        {"name": name, "shape": list(value.shape), "datatype": name,
         "data": [each.decode() if isinstance(each, bytes) else each for each in value.ravel().tolist()]}
        for name, value in VALUES.items()
    ]  # fmt: skip
    question = v2.InferenceRequest.model_validate({"id": "1", "inputs": inputs}).model_dump(exclude_none=True)
    answer = ask(server, "/v2/models/digits/infer", question)
    v2.InferenceResponse.model_validate(answer, strict=True)
    assert [output["data"] for output in answer["outputs"]] == [each["data"] for each in inputs]


def missing(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return the paths of ``wanted`` that ``found`` lacks, or has with another value."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [each for key in wanted for each in missing(wanted[key], found.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [
            each for i, pair in enumerate(zip(wanted, found, strict=True)) for each in missing(*pair, f"{path}[{i}]")
        ]
    return [] if wanted == found else [path]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cluster-serving-runtime.yaml", "V1alpha1ClusterServingRuntime"),
        ("inference-service.yaml", "V1beta1InferenceService"),
    ],
)
def test_every_field_of_the_manifests_exists_in_kserve(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's types drop unknown fields, so an unknown field is missing in their output."""
    for each in dir(kubernetes.client.models):
        if each.startswith("V"):  # read as it is: tests/deploy has the schemas of Kubernetes itself
            monkeypatch.setattr(kserve.models, each, object, raising=False)
    manifest, client = read(name), ApiClient()
    found = client._ApiClient__deserialize(manifest, kind)
    assert missing(manifest, client.sanitize_for_serialization(found)) == []


def test_the_example_requests_what_the_runtime_offers() -> None:
    runtime, service = read("cluster-serving-runtime.yaml"), read("inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"] in runtime["spec"]["supportedModelFormats"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    args = container()["args"]
    assert "--http-port=8080" in args, "the port that KServe sends to"
    assert {container()[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {8080}
