"""Tensors outside of the message, sent by the stock client over HTTP, gRPC, and a gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import queue
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient import grpc as grpc_client
from tritonclient import http as http_client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from headrace import (
    Extension,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    NotFound,
    Spec,
    TensorLocation,
    TooLargeForLoop,
    hookimpl,
)
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.telemetry import log_limits
from headrace_locations.located_plans import LocatedPlan
from headrace_locations.tensor_locations import TensorLocations

PROTOCOLS = ("http", "grpc", "stream")
CONFIG = """
backend: "identity" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] },
        { name: "s" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "t" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
X = np.array([[1.5, -2, 3]], np.float32)


class Regions(TensorLocation):
    """Regions of this process, as Triton's extension has them."""

    name = "shared_memory_region"
    memory_name = "shared memory"
    regions: ClassVar[dict[str, bytearray]] = {}
    specs: ClassVar[list[Spec]] = []
    #: The sizes of finished outputs, and the error to raise then.
    finished: ClassVar[list[tuple[int, int]]] = []
    failure: ClassVar[Exception | None] = None

    def source(self, parameters: Mapping[str, Any], tensor: Spec) -> memoryview:
        self.specs.append(tensor)
        if parameters["shared_memory_region"] == "slow":
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                raise TooLargeForLoop
        if parameters["shared_memory_region"] not in self.regions:
            raise NotFound(f"Unable to find shared memory region: '{parameters['shared_memory_region']}'")
        begin = parameters.get("shared_memory_offset", 0)
        memory = memoryview(self.regions[parameters["shared_memory_region"]])
        return memory[begin : begin + parameters["shared_memory_byte_size"]]

    target = source

    def finish(self, memory: Any, written: int) -> None:
        self.finished.append((memoryview(memory).nbytes, written))
        if self.failure is not None:
            raise self.failure


class Drawer(TensorLocation):
    """Another parameter, which Triton does not have."""

    name = "drawer"

    def source(self, parameters: Mapping[str, Any], tensor: Spec) -> Any:
        return 1 / 0 if parameters["drawer"] == "broken" else bytes(Regions.regions[parameters["drawer"]])

    def target(self, parameters: Mapping[str, Any], tensor: Spec) -> memoryview:
        return memoryview(self.source(parameters, tensor))  # which is read-only


class Again(HttpRoute):
    """Answers an infer request by a route of its own."""

    name = "POST /again/{name}"

    async def answer(self, call: HttpCall) -> HttpReply:
        request = await call.read_inference(call.values["name"])
        parts = [await call.print_response(response) async for response in self.engine.responses(request, call.caller)]
        return HttpReply(200, (), parts)


class Elsewhere(Extension):
    name = "elsewhere"
    adds = (Regions, Drawer, Again)


Ask = Callable[..., Any]


@pytest.fixture
def hosts() -> tuple[str, str]:
    """The hosts of HTTP and gRPC. Plugins' tests have their own."""
    return "native", "native"


@pytest.fixture
def serve(
    hosts: tuple[str, str],
    write_model: Any,
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Runs ``scenario(ports)`` on a thread, against a server with the locations above."""
    http_server, grpc_server = hosts
    plugin, discover = ModuleType("test"), Plugins.discover
    plugin.register_extensions = hookimpl(lambda: [Elsewhere])  # type: ignore[attr-defined]

    def more(allow: Any = None) -> Plugins:
        plugins = discover([host for host in hosts if host != "native"])
        plugins._add(PluginInfo("test", "test", "0"), lambda: plugin)
        return plugins

    monkeypatch.setattr(Plugins, "discover", more)
    Regions.regions, Regions.specs = {"in": bytearray(X.tobytes()), "out": bytearray(12)}, []
    Regions.finished, Regions.failure = [], None

    def run(scenario: Callable[[dict[str, int]], None], **options: Any) -> None:
        write_model("m", CONFIG)

        async def main() -> None:
            local = {"http_address": "127.0.0.1", "http_port": 0, "grpc_address": "127.0.0.1", "grpc_port": 0}
            how = {"http_server": http_server, "grpc_server": grpc_server, "exit_timeout_secs": 5}
            server = make_server(**local, **how, allow_metrics=False, **options)
            async with server:
                await server.start_frontends()
                ports = {each.protocol or each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
                await asyncio.to_thread(scenario, ports)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def ask(ports: Mapping[str, int], protocol: str, inputs: list[Any], outputs: list[Any], request_id: str = "") -> Any:
    """Infer by the stock client; ``inputs`` and ``outputs`` are called with its module."""
    module = http_client if protocol == "http" else grpc_client
    wanted: dict[str, Any] = {
        "inputs": [each(module) for each in inputs],
        "outputs": [each(module) for each in outputs] or None,
        "request_id": request_id,
    }
    with module.InferenceServerClient(f"127.0.0.1:{ports['http' if protocol == 'http' else 'grpc']}") as client:
        if protocol != "stream":
            return client.infer("m", **wanted)
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("m", **wanted)
        result, error = answers.get(timeout=30)
        if error is not None:
            raise error
        return result


def region(name: str, shape: Any, datatype: str, where: str, size: int, offset: int = 0) -> Any:
    def make(module: Any) -> Any:
        tensor = module.InferInput(name, shape, datatype)
        tensor.set_shared_memory(where, size, offset)
        return tensor

    return make


def sent(name: str, array: Any, datatype: str = "FP32") -> Any:
    def make(module: Any) -> Any:
        tensor = module.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        return tensor

    return make


def wanted(name: str, where: str = "", size: int = 0, offset: int = 0) -> Any:
    def make(module: Any) -> Any:
        output = module.InferRequestedOutput(name)
        if where:
            output.set_shared_memory(where, size, offset)
        return output

    return make


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inputs_and_outputs_may_lie_in_regions(serve: Callable[..., None], protocol: str) -> None:
    text = np.array([["a", "bcd"]], np.object_)
    packed = serialize_byte_tensor(text).item()
    Regions.regions["text"] = bytearray(5) + packed

    def scenario(ports: dict[str, int]) -> None:
        Regions.regions["text"] = bytearray(5) + packed
        for _ in range(3):
            Regions.regions["out"][:] = bytes(12)
            result = ask(
                ports,
                protocol,
                [region("s", [1, 2], "BYTES", "text", len(packed), 5), region("x", [1, 3], "FP32", "in", 12)],
                [wanted("y", "out", 12), wanted("t")],
            )
            assert Regions.regions["out"] == X.tobytes()
            assert result.as_numpy("t").tolist() == [[b"a", b"bcd"]]
            output = result.get_output("y")
            actual = (output["datatype"], output["shape"]) if protocol == "http" else (output.datatype, output.shape)
            assert (actual[0], list(actual[1])) == ("FP32", [1, 3])
        # Inputs in the message beside such in a region, in either order.
        first = ask(ports, protocol, [sent("x", X * 2), region("s", [1, 2], "BYTES", "text", len(packed), 5)], [])
        second = ask(ports, protocol, [region("x", [1, 3], "FP32", "in", 12), sent("s", text, "BYTES")], [])
        np.testing.assert_array_equal(first.as_numpy("y"), X * 2)
        np.testing.assert_array_equal(second.as_numpy("y"), X)
        assert first.as_numpy("t").tolist() == second.as_numpy("t").tolist() == [[b"a", b"bcd"]]
        plain = ask(ports, protocol, [sent("x", X)], [wanted("y")])
        np.testing.assert_array_equal(plain.as_numpy("y"), X)

    serve(scenario)
    names = {(spec.name, spec.datatype.name) for spec in Regions.specs}
    assert names == {("x", "FP32"), ("s", "BYTES"), ("y", "FP32")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_requests_that_differ_only_in_their_ids_are_parsed_once(
    serve: Callable[..., None], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []
    request = LocatedPlan.request

    def noted(plan: LocatedPlan, *arguments: Any) -> Any:
        planned.append(arguments[-1])
        return request(plan, *arguments)

    monkeypatch.setattr(LocatedPlan, "request", noted)
    source, there = region("x", [1, 3], "FP32", "in", 12), wanted("y", "out", 12)

    def scenario(ports: dict[str, int]) -> None:
        for number, known_as in enumerate(("", "a", "ab", "x", "ä", 'a"b', "a\\", "in")):
            Regions.regions["in"][:] = (X * number).tobytes()
            answer = ask(ports, protocol, [source], [there], known_as).get_response()
            assert Regions.regions["out"] == (X * number).tobytes()
            assert (answer.get("id", "") if protocol == "http" else answer.id) == known_as
        assert planned[:2] == (["ab", "x"] if protocol == "http" else ["a", "ab"])
        # Other places, tensors and parameters are no part of the plan.
        Regions.regions["out"] = bytearray(16)
        ask(ports, protocol, [source], [wanted("y", "out", 12, 4)], "a")
        assert Regions.regions["out"][4:] == Regions.regions["in"]
        mixed = ask(ports, protocol, [source], [wanted("y")], "a")
        np.testing.assert_array_equal(mixed.as_numpy("y"), X * 7)
        with pytest.raises(InferenceServerException, match="unexpected inference output 'z'"):
            ask(ports, protocol, [source], [wanted("z", "out", 12)], "a")
        region = Regions.regions.pop("in")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
            ask(ports, protocol, [source], [there], "a")
        Regions.regions["in"] = region
        assert ask(ports, protocol, [source], [there], "a")

    serve(scenario)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_tensors_lie_in_regions_too(serve: Callable[..., None], protocol: str) -> None:
    big = np.arange(600_000, dtype=np.float32).reshape(1, -1)  # a thread writes the output

    def scenario(ports: dict[str, int]) -> None:
        Regions.regions |= {"in": bytearray(big.tobytes()), "out": bytearray(big.nbytes + 4)}
        ask(
            ports,
            protocol,
            [region("x", list(big.shape), "FP32", "in", big.nbytes)],
            [wanted("y", "out", big.nbytes, 4)],
        )
        assert Regions.regions["out"][4:] == big.tobytes()
        assert Regions.finished == [(big.nbytes, 0), (big.nbytes, big.nbytes)]

    serve(scenario)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_location_may_refuse_after_the_model_has_run(serve: Callable[..., None], protocol: str) -> None:
    source = region("x", [1, 3], "FP32", "in", 12)

    def scenario(ports: dict[str, int]) -> None:
        ask(ports, protocol, [source], [wanted("y", "out", 12)])
        assert Regions.finished == [(12, 0), (12, 12)], "the input was read, and the output written"
        Regions.finished.clear()
        ask(ports, protocol, [source], [wanted("y")])
        assert Regions.finished == [(12, 0)]
        for failure, text in ((InvalidArgument("it is lost"), "it is lost"), (ZeroDivisionError(), HIDDEN)):
            Regions.failure = failure
            for outputs in ([wanted("y")], [wanted("y", "out", 12)]):
                with pytest.raises(InferenceServerException, match=text):
                    ask(ports, protocol, [source], outputs)
            with pytest.raises(InferenceServerException, match=text):
                ask(ports, protocol, [sent("x", X)], [wanted("y", "out", 12)])

    serve(scenario)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_location_may_ask_for_a_thread(serve: Callable[..., None], protocol: str) -> None:
    def scenario(ports: dict[str, int]) -> None:
        Regions.regions["slow"] = bytearray(16) + X.tobytes()
        for _ in range(3):
            ask(ports, protocol, [region("x", [1, 3], "FP32", "slow", 12, 16)], [wanted("y", "out", 12)])
            assert Regions.regions["out"] == X.tobytes()
            Regions.regions["out"][:] = bytes(12)

    serve(scenario)
    assert [spec.name for spec in Regions.specs] == ["x", "x", "y"] * 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("size", "out", "message"),
    [
        (12, 8, "shared memory size specified with the request for output 'y' (8 bytes) should be at least 12 bytes"),
        (8, 12, "input byte size mismatch for input 'x' for model 'm'"),
        (12, -1, "Unable to find shared memory region: 'nowhere'"),
    ],
)
def test_tensor_that_does_not_fit_is_refused_in_tritons_words(
    serve: Callable[..., None], protocol: str, size: int, out: int, message: str
) -> None:
    def scenario(ports: dict[str, int]) -> None:
        output = wanted("y", "out", out) if out > 0 else wanted("y", "nowhere", 12)
        with pytest.raises(InferenceServerException) as refused:
            ask(ports, protocol, [region("x", [1, 3], "FP32", "in", size)], [output])
        assert message in refused.value.message()

    serve(scenario)


def post(port: int, tensor: Mapping[str, Any], outputs: list[Any] | None = None, **headers: str) -> httpx.Response:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], **tensor}
    body = {"inputs": [entry], "outputs": outputs or [{"name": "y"}]}
    content = orjson.dumps(body)
    if headers:
        content = gzip.compress(content)
    return httpx.post(f"http://127.0.0.1:{port}/v2/models/m/infer", content=content, headers=headers)


HIDDEN = "the request failed inside the server; its log has the reason"
IN = {"parameters": {"shared_memory_region": "in", "shared_memory_byte_size": 12}}


@pytest.mark.parametrize(
    ("tensor", "output", "status", "error"),
    [
        ({**IN, "data": [1, 2, 3]}, {}, 400, "But set 'data' 'shared_memory_region'"),
        ({"parameters": {"shared_memory_region": 7}}, {}, 500, "Unable to parse 'shared_memory_region'"),
        ({"parameters": {"drawer": [7]}}, {}, 400, "parameter 'drawer' has invalid type"),
        ({"parameters": {"drawer": "in", **IN["parameters"]}}, {}, 400, "can not lie in both 'drawer' and"),
        ({"parameters": {"drawer": "in", "shared_memory_region": "a"}}, {}, 400, "lie in both 'drawer' and 'shared"),
        ({"parameters": {"drawer": "in"}, "data": [1]}, {}, 400, "'shared_memory_region' in 'parameters', 'drawer' in"),
        ({"parameters": {"drawer": "broken"}}, {}, 500, HIDDEN),
        (IN, {"shared_memory_region": "out", "classification": 1}, 400, "and 'classification'"),
        (IN, {"shared_memory_region": "out", "binary_data": True}, 400, "and 'binary_data'"),
        (IN, {"drawer": "out"}, 500, HIDDEN),
        (IN, {"drawer": "out", "name": "z"}, 400, "unexpected inference output 'z' for model 'm'"),
    ],
)
def test_contradictory_locations_are_refused(
    serve: Callable[..., None], tensor: Any, output: Any, status: int, error: str
) -> None:
    def scenario(ports: dict[str, int]) -> None:
        parameters = {name: value for name, value in output.items() if name != "name"}
        outputs = [{"name": output.get("name", "y"), "parameters": parameters}]
        refused = post(ports["http"], tensor, outputs)
        assert error in refused.json()["error"]
        assert refused.status_code == status

    serve(scenario)


def test_a_parameter_of_its_own_is_a_location_too(serve: Callable[..., None]) -> None:
    def scenario(ports: dict[str, int]) -> None:
        reply = post(ports["http"], {"parameters": {"drawer": "in"}}, None, **{"Content-Encoding": "gzip"})
        assert reply.json()["outputs"][0]["data"] == X.ravel().tolist()
        # In a message beside which it means nothing.
        named = post(ports["http"], {"data": [4, 5, 6], "note": "drawer"})
        assert named.json()["outputs"][0]["data"] == [4, 5, 6]
        request = service_pb2.ModelInferRequest(model_name="m")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
        request.outputs.add(name="y")
        tensor.parameters["drawer"].string_param = "in"
        with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)
            answer = service_pb2.ModelInferResponse.FromString(call(request.SerializeToString()))
            assert answer.raw_output_contents[0] == X.tobytes()
            tensor.contents.fp32_contents.extend([1, 2, 3])
            with pytest.raises(grpc.RpcError, match="unexpected 'content' provided when using memory for input"):
                call(request.SerializeToString())

    serve(scenario)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_route_of_a_plugin_reads_and_writes_regions_too(serve: Callable[..., None], size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    Regions.regions = {"in": bytearray(x.tobytes()), "out": bytearray(4 * size)}
    lies = {"shared_memory_byte_size": 4 * size}
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, size], "parameters": {**lies, "shared_memory_region": "in"}}
        ],
        "outputs": [{"name": "y", "parameters": {**lies, "shared_memory_region": "out"}}],
    }  # fmt: skip

    def scenario(ports: dict[str, int]) -> None:
        reply = httpx.post(f"http://127.0.0.1:{ports['http']}/again/m", json=document)
        assert reply.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, size]}]
        assert bytes(Regions.regions["out"]) == x.tobytes()

    serve(scenario)


@pytest.mark.parametrize(
    ("tensor", "output", "place", "reason"),
    [
        ({"parameters": {"drawer": "broken"}}, {}, "input 'x'", "ZeroDivisionError: division by zero"),
        (IN, {"drawer": "out"}, "output 'y'", "TypeError: the memory is read-only"),
    ],
)
def test_the_reason_why_a_location_fails_is_in_the_log_only(
    serve: Callable[..., None], tensor: Any, output: Any, place: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario(ports: dict[str, int]) -> None:
        refused = post(ports["http"], tensor, [{"name": "y", "parameters": output}])
        assert (refused.status_code, refused.json()) == (500, {"error": HIDDEN})

    log_limits.flush()
    serve(scenario)
    assert f"tensor location 'drawer' failed at {place}" in caplog.text
    assert "Traceback" in caplog.text
    assert reason in caplog.text


def test_a_region_beside_another_location_is_refused_without_an_extension_for_regions() -> None:
    locations = TensorLocations([Drawer(SimpleNamespace(engine=None))])
    with pytest.raises(InvalidArgument, match="can not lie in both 'drawer' and 'shared_memory_region'"):
        locations.find({"shared_memory_region": "a", "drawer": "in"}, "x")
    assert locations.find({"shared_memory_region": "a"}, "x") is None


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"name": "binary_data_size"}, "named 'binary_data_size', which is a parameter of the protocol"),
        ({"name": "classification"}, "named 'classification', which is a parameter of the protocol"),
        ({"name": "no name"}, "which is no name of a parameter"),
        ({"name": "shelf", "source": TensorLocation.source}, "has neither 'source' nor 'target'"),
    ],
)
def test_a_location_that_can_not_be_asked_for_is_refused(members: dict[str, Any], reason: str) -> None:
    shelf: Any = type("Shelf", (TensorLocation,), {"source": Drawer.source, **members})
    with pytest.raises(TypeError, match=reason):
        shelf.check()
