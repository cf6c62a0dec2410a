"""The description of a server: judged by a validator of OpenAPI, and by posting its examples."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

import headrace
from headrace import HttpRoute
from headrace_openapi import document
from headrace_openapi.document import MAX_BYTES, MAX_MODEL_BYTES
from headrace_testing import ExtensionConformance, ServedExtension
from headrace_testing.serving import on_loop
from headrace_testing.serving import serve as serve_here

if TYPE_CHECKING:
    from tests.conftest import Headrace

IDENTITY = 'backend: "identity" '


def tensors(*, datatype: str = "FP32", dims: str = "1", more: str = "") -> str:
    io = f"data_type: TYPE_{datatype} dims: [{dims}]"
    return f'input {{ name: "x" {io} {more} }} output {{ name: "y" {io} }}'


CONFIGS: Mapping[str, str] = {
    **{
        each.lower(): IDENTITY + "max_batch_size: 4 " + tensors(datatype=each)
        for each in (
            "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "STRING"
        )
    },
    "half": IDENTITY + tensors(datatype="FP16"),
    "unbatched": IDENTITY + tensors(dims="-1, 3, -1"),
    "scalar": IDENTITY
    + "max_batch_size: 2 "
    + """input { name: "x" data_type: TYPE_FP32 dims: [1] reshape { } }
    output { name: "y" data_type: TYPE_FP32 dims: [1] reshape { } }""",
    "large": IDENTITY + tensors(dims="3, 64, 64"),
    "huge": IDENTITY + tensors(dims="3000, 3000"),
    "sequence": IDENTITY + "sequence_batching { } max_batch_size: 2 " + tensors(),
    "queued": IDENTITY + "dynamic_batching { } max_batch_size: 2 " + tensors(),
    "decoupled": IDENTITY + "model_transaction_policy { decoupled: true } " + tensors(),
    "optional": 'backend: "python" '
    + tensors()
    + 'input { name: "more" data_type: TYPE_INT32 dims: 1 optional: true }',
}  # fmt: skip
#: Returns its input, whether the optional one is there or not.
MODEL = """import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in given]
"""
#: No URL can have it, because names in paths are read as they are.
UNREACHABLE = 'odd {name} "ü" <b>%2F'
WITHOUT_EXAMPLE = {"half", "huge", "decoupled"}


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_openapi", "openapi"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("GET", "/openapi.json")
        assert (status, json.loads(body)["openapi"]) == (200, "3.1.0")
        status, _, body = served.http("GET", "/openapi/models/doubles/example.json")
        assert (status, json.loads(body)["inputs"][0]["name"]) == (200, "x")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "optional/1/model.py").write_text(MODEL)
    (folder / UNREACHABLE / "1").mkdir(parents=True)
    (folder / UNREACHABLE / "config.pbtxt").write_text(CONFIGS["fp32"])
    return folder


@pytest.fixture(scope="module", params=["http", "hypercorn"])
def server(request: pytest.FixtureRequest, keep_serving: Callable[..., Headrace], models: Path) -> Headrace:
    return keep_serving(f"--model-repository={models}", "--openapi-docs=true", f"--http-server={request.param}")


@pytest.fixture
def client(server: Headrace) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}", timeout=60) as client:
        yield client


def described(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = answer.json()
    return found


def test_the_description_is_valid_and_has_every_route(client: httpx.Client) -> None:
    description = described(client)
    assert [error.message for error in OpenAPIV31SpecValidator(description).iter_errors()] == []
    paths = description["paths"]
    assert {"post"} <= paths["/v2/models/{name}/infer"].keys() & paths[
        "/v2/models/{name}/versions/{version}/infer"
    ].keys()
    assert {"get", "post"} <= paths["/v2/logging"].keys(), "of an installed extension, two methods of one path"
    assert "post" in paths["/v2/models/{name}/generate_stream"]
    assert {"/openapi.json", "/docs", "/v2/health/live", "/v2/repository/index"} <= paths.keys()
    operations = [each for item in paths.values() for key, each in item.items() if key != "parameters"]
    assert all(each["summary"] for each in operations)
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert not [path for path in paths if "[" in path]


def test_the_routes_are_those_that_the_server_has(tmp_path: Path) -> None:
    with serve_here(tmp_path, listen=True) as server:
        names = [type(route).name for route in server.engine.additions(HttpRoute)]
        paths = httpx.get(f"http://127.0.0.1:{server.options.http_port}/openapi.json").json()["paths"]
    wanted = set()
    for method, path in (name.split(" ") for name in names):
        wanted |= {(method, re.sub(r"\[.*?\]", "", path)), (method, re.sub(r"[\[\]]", "", path))}
    assert len(wanted) > 20
    assert {(method.upper(), path) for path, item in paths.items() for method in item.keys() - {"parameters"}} == wanted


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT_EXAMPLE])
def test_the_example_of_a_model_works(client: httpx.Client, name: str) -> None:
    path = f"/v2/models/{name}/infer"
    content = described(client)["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    if name == "large":
        body = client.get(content["examples"]["zeros"]["externalValue"]).content
        assert len(json.loads(body)["inputs"][0]["data"]) == 3 * 64 * 64
    else:
        body = json.dumps(content["example"]).encode()
    answer = client.post(path, content=body)
    assert answer.status_code == 200, answer.text
    assert json.loads(client.get(f"/openapi/models/{name}/example.json").content) == json.loads(body)
    (output,) = answer.json()["outputs"]
    assert output["name"] == "y"


def test_a_model_name_that_fits_no_url_is_counted(client: httpx.Client) -> None:
    description = described(client)
    assert "1 of them have names that no path can have." in description["info"]["description"]
    assert "odd" not in str(description["paths"].keys())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("half", "FP16, which JSON can not express"), ("huge", "9000000 elements"), ("decoupled", "any number of")],
)
def test_a_model_without_an_example_has_the_reason(client: httpx.Client, name: str, reason: str) -> None:
    operation = described(client)["paths"][f"/v2/models/{name}/infer"]["post"]
    assert reason in operation["description"]
    assert "example" not in json.dumps(operation["requestBody"])
    answer = client.get(f"/openapi/models/{name}/example.json")
    assert answer.status_code == 501
    assert reason in answer.json()["error"]


def test_an_example_of_no_model_is_not_found(client: httpx.Client) -> None:
    answer = client.get("/openapi/models/none/example.json")
    assert answer.status_code == 404
    assert "none" in answer.json()["error"]


def test_the_page_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    answer = client.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for path in ("/docs/viewer.js", "/docs/viewer.css"):
        file = client.get(path)
        assert (file.status_code, file.headers["x-content-type-options"]) == (200, "nosniff")
        assert path.removeprefix("/") in answer.text
        assert "://" not in file.text
        assert "innerHTML" not in file.text
    assert "://" not in answer.text


def test_without_its_flag_there_is_no_page(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    server = serve(f"--model-repository={tmp_path}", "--http-restricted-api=metadata:key=1")
    url = f"http://127.0.0.1:{server.http}"
    assert httpx.get(f"{url}/docs").status_code == 404
    assert httpx.get(f"{url}/openapi.json").status_code == 403
    assert "/docs" not in httpx.get(f"{url}/openapi.json", headers={"key": "1"}).json()["paths"]


def test_the_description_follows_the_models(serve: Callable[..., Headrace], models: Path) -> None:
    server = serve(f"--model-repository={models}", "--model-control-mode=explicit")
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:

        def shape(name: str) -> Any:
            item = described(client)["paths"].get(f"/v2/models/{name}/infer")
            return item and item["post"]["requestBody"]["content"]["application/json"]["example"]["inputs"][0]["shape"]

        assert shape("fp32") is None
        assert client.post("/v2/repository/models/fp32/load").status_code == 200
        assert shape("fp32") == [1, 1]
        config = json.dumps({"backend": "identity", "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [5]}],
                             "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [5]}]})  # fmt: skip
        assert (
            client.post("/v2/repository/models/fp32/load", json={"parameters": {"config": config}}).status_code == 200
        )
        assert shape("fp32") == [5]
        assert client.post("/v2/repository/models/fp32/unload").status_code == 200
        assert shape("fp32") is None


def test_it_is_written_once_for_all_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real, has_all = document.write_document, threading.Event()

    def counted(*arguments: Any) -> bytes:
        written.append(1)
        has_all.wait(20)
        return real(*arguments)

    monkeypatch.setattr("headrace_openapi.description_routes.write_document", counted)
    with serve_here(tmp_path, listen=True) as server:
        url = f"http://127.0.0.1:{server.options.http_port}/openapi.json"

        async def ask() -> list[httpx.Response]:
            asyncio.get_running_loop().call_later(0.5, has_all.set)  # by then, all requests have arrived
            async with httpx.AsyncClient(timeout=60) as client:
                return list(await asyncio.gather(*(client.get(url) for _ in range(20))))

        assert len({answer.content for answer in asyncio.run(ask())}) == 1
        assert len(written) == 1


def test_with_500_models_it_is_bounded(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"model{number}/1").mkdir(parents=True)
        (tmp_path / f"model{number}/config.pbtxt").write_text(CONFIGS["fp32"])
    inputs = "".join(f'input {{ name: "{"x" * 60}{n}" data_type: TYPE_FP32 dims: 1 }}' for n in range(1000))
    outputs = "".join(f'output {{ name: "y{n}" data_type: TYPE_FP32 dims: 1 }}' for n in range(1000))
    (tmp_path / "wide/1").mkdir(parents=True)
    (tmp_path / "wide/config.pbtxt").write_text(IDENTITY + inputs + outputs)
    with headrace.Server(tmp_path) as server:
        views = [server.resolve(name).view for name in sorted(path.name for path in tmp_path.iterdir())]
        written = document.write_document("triton", "1", [], views)
    paths = json.loads(written)["paths"]
    assert len(paths) == 500, "all but the wide one"
    assert "1 of them do not fit" in json.loads(written)["info"]["description"]
    assert len(written) < 1 << 20 < MAX_BYTES
    assert max(len(json.dumps(item)) for item in paths.values()) < MAX_MODEL_BYTES


def test_two_servers_of_one_process_have_separate_descriptions(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def noted(name: str, *arguments: Any) -> bytes:
        written.append(name)
        return document.write_document(name, *arguments)

    monkeypatch.setattr("headrace_openapi.description_routes.write_document", noted)
    both = [serve_here(models, id=name, model_control_mode="explicit", load_model=[name]) for name in ("fp32", "int8")]
    with both[0] as one, both[1] as other:

        def described_by(server: headrace.Server) -> tuple[str, set[str]]:
            (extension,) = [each for each in server.engine.extensions if each.name == "openapi"]
            found = json.loads(on_loop(server, extension.document()))
            return found["info"]["title"], {
                path for path in found["paths"] if path[11:] in ("fp32/infer", "int8/infer")
            }

        assert described_by(one) == ("fp32", {"/v2/models/fp32/infer"})
        assert described_by(other) == ("int8", {"/v2/models/int8/infer"})
        on_loop(other, other.unload("int8"))
        assert described_by(other) == ("int8", set())
        assert described_by(one) == ("fp32", {"/v2/models/fp32/infer"})
    assert written == ["fp32", "int8", "int8"], "a change of one server is none of the other"
