"""Programs written for Triton work, with each of the four stock clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.protocol.conftest import Client

INTEGERS = [f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)]
FLOATS: dict[str, Any] = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
VALUES: dict[str, npt.NDArray[Any]] = {
    **{
        name: np.array([np.iinfo(name.lower()).min, 0, 1, np.iinfo(name.lower()).max], name.lower())
        for name in INTEGERS
    },
    **{name: np.array([np.finfo(kind).min, -0.0, 0.1, np.inf, np.nan], kind) for name, kind in FLOATS.items()},
    "BF16": np.array([1.0, -2.5, 3.140625, 65536.0, np.inf], ml_dtypes.bfloat16),
    "BOOL": np.array([True, False, True]),
    "BYTES": np.array([b"", b"\x00\xff", "naïve".encode(), b"x" * 300], np.object_),
}


@pytest.mark.parametrize("datatype", VALUES)
def test_every_datatype_is_returned_unchanged(client: Client, datatype: str) -> None:
    sent = VALUES[datatype]
    answer = client.echo(f"echo_{datatype.lower()}", sent, datatype).as_numpy("OUT")
    assert answer.dtype == sent.dtype
    np.testing.assert_array_equal(answer, sent)


@pytest.mark.parametrize("datatype", [*INTEGERS, "FP32", "FP64", "BOOL"])
def test_json_tensors_carry_the_same_values(http_client: Client, datatype: str) -> None:
    sent = VALUES[datatype][:3]
    tensor = http_client.input("IN", sent, datatype, binary_data=False)
    wanted = http_client.output("OUT", binary_data=False)
    answer = http_client.infer(f"echo_{datatype.lower()}", [tensor], outputs=[wanted])
    assert "parameters" not in answer.get_response()["outputs"][0]
    np.testing.assert_array_equal(answer.as_numpy("OUT"), sent)


def test_json_strings_carry_text(http_client: Client) -> None:
    sent = np.array(["naïve", "", '\u2028 "quoted" \\'], np.object_)
    tensor = http_client.input("IN", sent, "BYTES", binary_data=False)
    answer = http_client.infer("echo_bytes", [tensor], outputs=[http_client.output("OUT", binary_data=False)])
    assert answer.as_numpy("OUT").tolist() == sent.tolist()


def test_an_onnx_model_without_a_config_adds(client: Client) -> None:
    x, y = np.arange(32, dtype=np.float32).reshape(2, 16), np.full((2, 16), 0.5, np.float32)
    answer = client.infer("add", [client.input("X", x, "FP32"), client.input("Y", y, "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("SUM"), x + y)
    np.testing.assert_array_equal(answer.as_numpy("DIFF"), x - y)


def test_only_the_requested_outputs_are_sent_in_the_requested_order(client: Client) -> None:
    x = np.ones((1, 2), np.float32)
    inputs = [client.input("IN0", x, "FP32"), client.input("IN1", 2 * x, "FP32")]
    assert client.infer("pair", inputs, outputs=[client.output("OUT1")]).as_numpy("OUT0") is None
    both = client.infer("pair", inputs, outputs=[client.output("OUT1"), client.output("OUT0")])
    np.testing.assert_array_equal(both.as_numpy("OUT1"), 2 * x)
    np.testing.assert_array_equal(both.as_numpy("OUT0"), x)


def test_inputs_may_come_in_any_order(client: Client) -> None:
    x = np.ones((1, 2), np.float32)
    answer = client.infer("pair", [client.input("IN1", 2 * x, "FP32"), client.input("IN0", x, "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("OUT1"), 2 * x)
    np.testing.assert_array_equal(answer.as_numpy("OUT0"), x)


def test_the_request_id_model_and_version_are_in_the_answer(client: Client) -> None:
    answer = client.metadata(client.echo("versions", np.zeros(4, np.float32), "FP32", request_id="r-1").get_response())
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("r-1", "versions", "3")


@pytest.mark.parametrize("version", ["1", "3"])
def test_a_version_may_be_asked_for(client: Client, version: str) -> None:
    answer = client.echo("versions", np.zeros(4, np.float32), "FP32", model_version=version)
    assert client.metadata(answer.get_response())["model_version"] == version


@pytest.mark.parametrize("rows", [1, 8])
def test_a_batch_is_returned_whole(client: Client, rows: int) -> None:
    sent = np.random.default_rng(rows).random((rows, 4), np.float32)
    np.testing.assert_array_equal(client.echo("batched", sent, "FP32").as_numpy("OUT"), sent)


def test_a_model_sees_the_reshaped_tensor_and_the_caller_does_not(client: Client) -> None:
    sent = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(client.echo("reshaped", sent, "FP32").as_numpy("OUT"), sent)


def test_scalars_travel_as_one_element_a_row(client: Client) -> None:
    sent = np.array([[1.5], [2.5], [3.5]], np.float32)
    np.testing.assert_array_equal(client.echo("scalar", sent, "FP32").as_numpy("OUT"), sent)


def test_an_optional_input_may_be_left_out(client: Client) -> None:
    x = np.ones((2, 2), np.float32)
    wanted = [client.output("OUT0")]
    answer = client.infer("optional", [client.input("IN0", x, "FP32")], outputs=wanted)
    np.testing.assert_array_equal(answer.as_numpy("OUT0"), x)
    both = [client.input("IN0", x, "FP32"), client.input("IN1", 2 * x, "FP32")]
    np.testing.assert_array_equal(client.infer("optional", both).as_numpy("OUT1"), 2 * x)


EMPTY = [
    ("echo_fp32", "FP32", (0,)),
    ("echo_bytes", "BYTES", (0,)),
    ("matrix", "INT32", (0, 3)),
    ("batched", "FP32", (0, 4)),
]


@pytest.mark.parametrize(("model", "datatype", "shape"), EMPTY)
def test_a_tensor_without_elements_comes_back_with_its_shape(
    client: Client, model: str, datatype: str, shape: tuple[int, ...]
) -> None:
    sent = np.zeros(shape, {"FP32": np.float32, "INT32": np.int32, "BYTES": np.object_}[datatype])
    answer = client.metadata(client.echo(model, sent, datatype).get_response())
    assert [int(dim) for dim in answer["outputs"][0]["shape"]] == list(shape)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_requests_and_answers_may_be_compressed(client: Client, algorithm: str) -> None:
    sent = np.zeros((8, 4), np.float32)
    how: dict[str, Any] = {"compression_algorithm": algorithm}
    if client.is_http:
        how = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    np.testing.assert_array_equal(client.echo("batched", sent, "FP32", **how).as_numpy("OUT"), sent)


def test_classes_come_with_score_index_and_label(client: Client) -> None:
    sent = np.array([[0.5, 2.25, 1.0, -1.0], [4.0, 1.0, 2.0, 3.0]], np.float32)
    answer = client.echo("classes", sent, "FP32", outputs=[client.output("OUT", class_count=3)])
    assert answer.as_numpy("OUT").tolist() == [
        [b"2.250000:1:bee", b"1.000000:2:cat", b"0.500000:0:ant"],
        [b"4.000000:0:ant", b"3.000000:3", b"2.000000:2:cat"],
    ]


def test_more_classes_than_there_are_give_all_of_them(client: Client) -> None:
    sent = np.array([3, -7, 5], np.int32)
    answer = client.echo("classes_flat", sent, "INT32", outputs=[client.output("OUT", class_count=2**31 - 1)])
    assert answer.as_numpy("OUT").tolist() == [b"5:2", b"3:0", b"-7:1"]


def test_parameters_of_the_caller_are_taken(client: Client) -> None:
    parameters = {"text": "a", "count": 3, "flag": True}
    client.echo("batched", np.zeros((1, 4), np.float32), "FP32", parameters=parameters, priority=1, timeout=10**7)


def test_the_server_is_live_and_ready(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add")
    assert client.is_model_ready("versions", "1")


def test_an_unknown_model_or_version_is_not_ready(client: Client) -> None:
    for model, version in (("nosuch", ""), ("versions", "2")):
        assert not client.is_model_ready(model, version)


def test_the_server_metadata_has_its_name_and_version(client: Client) -> None:
    answer = client.metadata(client.get_server_metadata())
    assert answer["name"] == "triton"
    assert {"classification", "model_configuration", "binary_tensor_data", "statistics"} <= set(answer["extensions"])


def test_metadata_shows_versions_and_tensors(client: Client) -> None:
    answer = client.metadata(client.get_model_metadata("versions"))
    assert (answer["name"], answer["versions"]) == ("versions", ["1", "3"])
    assert client.metadata(client.get_model_metadata("versions", "1"))["versions"] == ["1"]
    tensors = client.metadata(client.get_model_metadata("add"))
    shown = [(each["name"], each["datatype"], [int(dim) for dim in each["shape"]]) for each in tensors["inputs"]]
    assert sorted(shown) == [("X", "FP32", [-1, 16]), ("Y", "FP32", [-1, 16])]
    assert tensors["platform"] == "onnxruntime_onnx"


def test_metadata_shows_dims_before_the_reshape(client: Client) -> None:
    answer = client.metadata(client.get_model_metadata("reshaped"))
    assert [int(dim) for dim in answer["inputs"][0]["shape"]] == [-1, 4]


def test_the_config_is_the_whole_config(client: Client) -> None:
    answer = client.metadata(client.get_model_config("batched"))
    config = answer if client.is_http else answer["config"]
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("batched", 8, "identity")
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert [int(dim) for dim in config["input"][0]["dims"]] == [4]
    assert config["input"][0]["optional"] is False


def test_statistics_count_requests_inferences_and_executions(client: Client) -> None:
    def counts() -> list[int]:
        answer = client.metadata(client.get_inference_statistics("pair"))
        (entry,) = answer["model_stats"]
        stats = entry["inference_stats"]
        return [int(entry["inference_count"]), int(stats["success"]["count"]), int(stats["fail"]["count"])]

    before, x = counts(), np.ones((3, 2), np.float32)
    for _ in range(2):
        client.infer("pair", [client.input("IN0", x, "FP32"), client.input("IN1", x, "FP32")])
    assert counts() == [before[0] + 6, before[1] + 2, before[2]]


def test_the_index_lists_every_version(client: Client) -> None:
    answer = client.metadata(client.get_model_repository_index())
    entries = answer if client.is_http else answer["models"]
    shown = {(entry["name"], entry["version"], entry["state"]) for entry in entries}
    assert {("versions", "1", "READY"), ("versions", "3", "READY"), ("add", "1", "READY")} <= shown


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
def test_models_are_not_loaded_over_the_network(client: Client, method: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        getattr(client, method)("add")
    assert caught.value.message() == (
        "explicit model load / unload is not allowed in model control mode 'none'; start the server with "
        "--model-control-mode=explicit"
    )
    assert caught.value.status() == ("503" if client.is_http else "StatusCode.UNAVAILABLE")


def test_an_error_has_the_same_text_over_every_client(client: Client) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.echo("nosuch", np.zeros(4, np.float32), "FP32")
    assert caught.value.message() == "Request for unknown model: 'nosuch' is not found"
    assert caught.value.status() == ("404" if client.is_http else "StatusCode.NOT_FOUND")


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_many_requests_may_be_under_way(server: Headrace, connect: Any, name: str) -> None:
    client = connect(name, server)
    tensors = [np.full((1, 4), row, np.float32) for row in range(20)]
    inputs = [[client.input("IN", each, "FP32")] for each in tensors]
    if client.is_http:
        answers = [each.get_result() for each in [client.async_infer("batched", tensor) for tensor in inputs]]
    else:
        import queue

        done: queue.Queue[Any] = queue.Queue()
        for row, tensor in enumerate(inputs):
            client.async_infer("batched", tensor, lambda result, error: done.put((result, error)), request_id=str(row))
        pairs = [done.get(timeout=30) for _ in inputs]
        assert not any(error for _, error in pairs)
        answers = sorted((result for result, _ in pairs), key=lambda each: int(each.get_response().id))
    for sent, answer in zip(tensors, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUT"), sent)
