"""Routers on a real server, over every protocol, compared with their targets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from prometheus_client.parser import text_string_to_metric_families

from headrace import Server
from headrace_testing.serving import WAYS, infer, serve

from .conftest import identity, router, write

ROW = np.array([[1, 2]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "m", identity(more="version_policy { all { } }"), (1, 2))
    write(repository, "strings", identity(datatype="STRING"))
    write(repository, "split", router("m:1 = 75, m = 25"))
    write(repository, "named", router("strings = 1"))
    write(repository, "sticky", router("m:1 = 1, m:2 = 1", sticky="parameter:user"))
    write(repository, "ruled", router("m:1 = 1, m:2 = 0", rules="parameter:beta = true -> m:2; parameter:any -> m:2"))
    write(repository, "above", router("split = 1, sticky = 0"))
    with serve(repository, listen=True, allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1") as server:
        yield server


def call(server: Server, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.options.http_port, timeout=60)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def targets(server: Server, model: str, count: int = 1, **parameters: Any) -> Counter[str]:
    """Ask ``count`` times. Return how often each target has answered."""
    inputs = {"x": ROW}
    found: Counter[str] = Counter()
    for _ in range(count):
        answer = server.infer(model, inputs, parameters=parameters)
        found[str(answer.parameters["headrace_target"])] += 1
    return found


@pytest.mark.parametrize("over", WAYS)
def test_a_router_answers_as_its_targets_do(over: Any, server: Server) -> None:
    np.testing.assert_array_equal(np.asarray(infer(server, "split", {"x": ROW}, over)["y"]), ROW)
    text = np.array([["a", "ü"]], object)
    fields = infer(server, "named", {"x": text}, over)["y"]
    assert fields.to_objects().tolist() == [[b"a", "ü".encode()]]  # type: ignore[union-attr]


def test_the_stock_clients_use_it_like_any_model(server: Server) -> None:
    http = httpclient.InferenceServerClient(f"127.0.0.1:{server.options.http_port}")
    grpc = grpcclient.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}")
    metadata = http.get_model_metadata("split")
    assert metadata["inputs"] == http.get_model_metadata("m")["inputs"]
    assert metadata["outputs"] == http.get_model_metadata("m")["outputs"]
    assert http.get_model_config("split")["max_batch_size"] == 8
    assert grpc.get_model_config("split", as_json=True)["config"]["input"][0]["name"] == "x"
    x = httpclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(ROW)
    answer = http.infer("split", [x], request_id="7").get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("split", "1", "7")
    assert answer["parameters"]["headrace_target"] in ("m", "m:1")
    assert answer["parameters"]["headrace_routed_by"] == "weights"
    x = grpcclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(ROW)
    response = grpc.infer("split", [x]).get_response()
    assert (response.model_name, response.parameters["headrace_routed_by"].string_param) == ("split", "weights")


def test_versions_of_one_model_get_their_shares(server: Server) -> None:
    before = [model.snapshot().success.count for model in server.served("m")]
    found = targets(server, "split", 400)
    assert abs(found["m:1"] - 300) < 4
    after = [model.snapshot().success.count for model in server.served("m")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [found["m:1"], found["m"]]


def test_a_key_stays_with_its_target(server: Server) -> None:
    found = {user: targets(server, "sticky", 3, user=user) for user in range(40)}
    assert all(len(each) == 1 for each in found.values())
    assert {label for each in found.values() for label in each} == {"m:1", "m:2"}
    assert targets(server, "sticky", 3, user="7") == found[7], "7 and '7' are one key: JSON and gRPC differ in types"
    assert len(targets(server, "sticky", 10)) == 2, "requests without the key follow the weights"


def test_rules_take_precedence_over_weights(server: Server) -> None:
    assert targets(server, "ruled", 5) == {"m:1": 5}
    assert targets(server, "ruled", 2, beta=True) == targets(server, "ruled", 2, beta="true") == {"m:2": 2}
    assert targets(server, "ruled", 2, beta=False) == {"m:1": 2}
    assert targets(server, "ruled", 2, any=0) == {"m:2": 2}


def test_routers_may_stand_before_routers(server: Server) -> None:
    answer = server.infer("above", {"x": ROW})
    assert answer.model_name == "above"
    assert answer.parameters["headrace_target"] == "split"


def test_an_error_of_the_target_reaches_the_caller_and_is_counted(server: Server) -> None:
    with pytest.raises(Exception, match="unexpected inference input 'z' for model 'split'"):
        server.infer("split", {"z": ROW})
    status, document = call(server, "GET", "/v2/models/split/traffic")
    assert status == 200
    assert sum(target["errors"] for target in document["targets"]) == 0, (
        "a request that the router refuses reached no target"
    )


def test_weights_change_without_a_load(server: Server) -> None:
    path = "/v2/models/split/traffic"
    before = server.served("split")
    try:
        status, document = call(server, "PUT", path, '{"weights": {"m": 1, "m:1": 1}}')
        assert (status, [target["share"] for target in document["targets"]]) == (200, [0.5, 0.5])
        assert abs(targets(server, "split", 100)["m"] - 50) < 4
        assert call(server, "PUT", "/v2/models/split/versions/1/traffic", '{"weights": {"m": 0, "m:1": 2}}')[0] == 200
        assert targets(server, "split", 100) == {"m:1": 100}
        assert server.served("split")[0] is before[0]
    finally:
        call(server, "PUT", path, '{"weights": {"m:1": 75, "m": 25}}')


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "the body is no JSON: Expecting value"),
        ("nope", "the body is no JSON: Expecting value"),
        ("\0\xff", "the body is no JSON"),
        ("[" * 60_000, "the body is no JSON: maximum recursion depth exceeded"),
        ("[1]", "the body is no JSON object"),
        ("{}", "the body changes nothing; known: "),
        ('{"weight": {}}', "unknown key 'weight'; known: "),
        ('{"weights": [1, 2]}', "'weights' is no object that maps each target to its weight"),
        ('{"weights": {"m:1": 1}}', "'weights': 'm' has no weight; give one for each of m:1, m"),
        ('{"weights": {"m:1": 1, "m": 1, "other": 1}}', "'weights': 'other' is no target; the targets are m:1, m"),
        ('{"weights": {"m:1": 0, "m": 0}}', "'weights': all weights are 0; at least one must be above 0"),
        ('{"weights": {"m:1": NaN, "m": 1}}', "'weights': the weight of 'm:1' is NaN; expected a number from 0 to "),
        ('{"weights": {"m:1": 1e999, "m": 1}}', "'weights': the weight of 'm:1' is Infinity; expected a number"),
        ('{"weights": {"m:1": -0.5, "m": 1}}', "'weights': the weight of 'm:1' is -0.5; expected a number"),
        ('{"weights": {"m:1": "1", "m": 1}}', """'weights': the weight of 'm:1' is "1"; expected a number"""),
        ('{"weights": {"m:1": true, "m": 1}}', "'weights': the weight of 'm:1' is true; expected a number"),
        ('{"weights": {"m:1": 1, "m:1": 1, "m": 1}}', "the body has the key 'm:1' twice"),
        (" " * 70_000, "the body has 70000 bytes; the limit is 65536"),
    ],
)
def test_a_wrong_change_changes_nothing(body: str, why: str, server: Server) -> None:
    status, document = call(server, "PUT", "/v2/models/split/traffic", body)
    assert status == 400
    assert why in document["error"]
    weights = [target["weight"] for target in call(server, "GET", "/v2/models/split/traffic")[1]["targets"]]
    assert weights == [75, 25]


def over_grpc(server: Server, method: str, **fields: Any) -> dict[str, Any]:
    message = Struct()
    message.update(fields)
    with grpc.insecure_channel(f"127.0.0.1:{server.options.grpc_port}") as channel:
        ask = channel.unary_unary(
            f"/headrace.Traffic/{method}",
            request_serializer=Struct.SerializeToString,
            response_deserializer=Struct.FromString,
        )
        found: dict[str, Any] = json_format.MessageToDict(ask(message, timeout=60))
        return found


def test_grpc_has_the_same_answers_and_effects(server: Server) -> None:
    expected = call(server, "GET", "/v2/models/sticky/traffic")[1]
    assert over_grpc(server, "Read", model="sticky") == expected
    assert over_grpc(server, "Read", model="sticky", version="1") == expected
    changed = over_grpc(server, "Change", model="sticky", weights={"m:1": 3, "m:2": 1})
    assert [target["share"] for target in changed["targets"]] == [0.75, 0.25]
    over_grpc(server, "Change", model="sticky", weights={"m:1": 1, "m:2": 1})
    for fields, why in (
        ({"model": "sticky", "weights": {"m:1": float("nan"), "m:2": 1}}, "the weight of 'm:1' is NaN"),
        ({"model": "sticky"}, "the body changes nothing"),
        ({"model": 3, "weights": {}}, "'model' and 'version' are strings"),
        ({"model": "m", "weights": {}}, "model 'm' is no router"),
        ({"model": "m" * 70_000}, "bytes; the limit is 65536"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            over_grpc(server, "Change", **fields)
        assert why in str(caught.value.details())
    assert over_grpc(server, "Read", model="sticky")["targets"][0]["weight"] == 1


def test_only_routers_have_traffic(server: Server) -> None:
    for method in ("GET", "PUT"):
        status, document = call(server, method, "/v2/models/m/traffic", "{}")
        assert (status, document["error"]) == (404, "model 'm' is no router: its traffic goes to itself")
        assert call(server, method, "/v2/models/none/traffic", "{}")[0] == 404
        assert call(server, method, "/v2/models/split/versions/9/traffic", "{}")[0] == 404


def test_the_metrics_page_has_each_target(server: Server) -> None:
    targets(server, "ruled", 2, beta=True)
    (metrics,) = (frontend for frontend in server.frontends if frontend.name == "metrics")
    port = metrics.port  # type: ignore[attr-defined]  # the frontend's own
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("model") == "ruled":
                found.setdefault(sample.name, {})[sample.labels.get("target", sample.labels.get("by", ""))] = (
                    sample.value
                )
    assert found["headrace_router_weight"] == {"m:1": 1, "m:2": 0}
    assert found["headrace_router_requests_total"]["m:2"] == found["headrace_router_decisions_total"]["rule"] >= 2
    assert found["headrace_router_errors_total"] == {"m:1": 0, "m:2": 0}
