"""Responses as the stock client reads them (docs/spec/behaviours.md section 2.4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as client
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import service_pb2 as triton

from headrace.engine import ModelView
from headrace.errors import InvalidArgument, PluginError
from headrace.messages import dtypes
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor, Tensor
from headrace_grpc.encode import encode, encode_empty, pack, pack_stream
from headrace_grpc.grpc_service_pb2 import ModelInferResponse

NUMERIC = [dtype for dtype in dtypes.ALL if dtype.name not in ("BYTES", "BF16")]
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def model(batch: int = 0, **labels: list[str]) -> ModelView:
    """The part of a model that the encoder uses."""
    return cast("ModelView", SimpleNamespace(max_batch_size=batch, labels=labels))


def response(**outputs: Tensor) -> InferResponse:
    return InferResponse(outputs, model_name="m", model_version="1", id="7")


def received(body: bytes) -> Any:
    return client.InferResult(triton.ModelInferResponse.FromString(body))


@pytest.mark.parametrize("datatype", NUMERIC, ids=str)
@given(data=st.data())
def test_the_client_reads_what_the_model_gave(datatype: dtypes.DataType, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(datatype.numpy, shapes))
    result = received(encode(response(y=array, z=array[::-1] if array.ndim else array), model()))
    assert result.get_output("y").datatype == datatype.name
    np.testing.assert_array_equal(result.as_numpy("y"), array)
    np.testing.assert_array_equal(result.as_numpy("z"), array[::-1] if array.ndim else array)


@given(st.lists(st.binary(max_size=6), max_size=5))
def test_the_client_reads_the_strings(items: list[bytes]) -> None:
    result = received(encode(response(y=BytesTensor.from_items(items, (len(items),))), model()))
    assert list(result.as_numpy("y")) == items


def test_bf16_is_sent_as_it_is() -> None:
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    message = triton.ModelInferResponse.FromString(encode(response(y=values), model()))
    assert (message.outputs[0].datatype, message.raw_output_contents[0]) == ("BF16", b"\xc0\x3f\x00\xc0")


def test_golden_bytes() -> None:
    array = np.array([[1.0]], np.float32)
    output = b"\x0a\x01y\x12\x04FP32\x1a\x02\x01\x01"
    expected = b"\x0a\x01m\x12\x011\x1a\x017\x2a\x0d" + output + b"\x32\x04\x00\x00\x80\x3f"
    assert encode(response(y=array), model()) == expected


def test_a_tensor_without_elements_has_an_empty_entry() -> None:
    body = encode(response(y=np.zeros((0, 3), np.float32), z=np.ones(1, np.int8)), model())
    assert list(triton.ModelInferResponse.FromString(body).raw_output_contents) == [b"", b"\x01"]


def test_parameters_keep_their_types() -> None:
    answer = InferResponse({}, {"a": True, "b": 1, "c": 0.5, "d": "t"})
    message = triton.ModelInferResponse.FromString(encode(answer, model(), final=True))
    kinds = {key: value.WhichOneof("parameter_choice") for key, value in message.parameters.items()}
    assert kinds == {
        "a": "bool_param",
        "b": "int64_param",
        "c": "double_param",
        "d": "string_param",
        "triton_final_response": "bool_param",
    }
    assert message.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("final", [None, True])
@pytest.mark.parametrize("id", ["", "7"])
def test_parameters_that_are_looked_up_are_those_that_are_written(id: str, final: bool | None) -> None:
    for _ in range(2):
        for parameters in ({"a": "t", "b": "ü"}, {"a": "u"}, {"a": "1"}, {"a": 1}, {"a": True}, {"a": 1.0}):
            message = triton.ModelInferResponse.FromString(
                encode(InferResponse({}, parameters, id=id), model(), final=final)
            )
            found = {
                key: getattr(each, each.WhichOneof("parameter_choice")) for key, each in message.parameters.items()
            }
            assert found.pop("triton_final_response", None) is final
            assert found == parameters
            assert [type(value) for value in found.values()] == [type(value) for value in parameters.values()]
            assert message.id == id


@pytest.mark.parametrize("value", [2**63, b"\xff", None])
def test_a_parameter_that_cannot_be_sent_blames_the_backend(value: Any) -> None:
    with pytest.raises(PluginError, match=r"^response parameter 'p' can not be sent: "):
        encode(InferResponse({}, {"p": value}), model())


def test_an_output_is_classified_with_its_labels() -> None:
    scores = np.array([[0.25, 0.5], [3, 1]], np.float32)
    body = encode(response(y=scores, z=scores), model(4, y=["cat", "dog"]), {"y": 1})
    result = received(body)
    assert result.as_numpy("y").tolist() == [[b"0.500000:1:dog"], [b"3.000000:0:cat"]]
    np.testing.assert_array_equal(result.as_numpy("z"), scores)


def test_an_output_that_cannot_be_classified_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="class result not available for output due to unsupported type 'BOOL'"):
        encode(response(y=np.array([True])), model(), {"y": 1})


def test_an_empty_response_is_named_after_its_request() -> None:
    message = triton.ModelInferResponse.FromString(encode_empty("7", "m", "", True))
    expected = triton.ModelInferResponse(model_name="m", id="7")
    expected.parameters["triton_final_response"].bool_param = True
    assert message == expected


# ---------------------------------------------------------------------- hand-made bytes against protobuf's own


@given(st.lists(st.binary(max_size=300), max_size=4), st.text(max_size=5))
def test_pack_gives_protobufs_bytes(raw: list[bytes], name: str) -> None:
    expected = triton.ModelInferResponse(model_name=name, raw_output_contents=raw).SerializeToString()
    header = ModelInferResponse(model_name=name).SerializeToString()
    assert pack(header, [memoryview(entry) for entry in raw]) == expected


@given(st.binary(max_size=300), st.text(max_size=200))
def test_pack_stream_gives_protobufs_bytes(content: bytes, error: str) -> None:
    response = triton.ModelInferResponse(id="7", raw_output_contents=[content])
    expected = triton.ModelStreamInferResponse(error_message=error, infer_response=response).SerializeToString()
    assert pack_stream(response.SerializeToString(), error) == expected


def test_golden_bytes_of_a_response() -> None:
    header = ModelInferResponse(model_name="m", id="7").SerializeToString()
    body = pack(header, [memoryview(b"\x00\x00\x80?"), memoryview(b"")])
    assert body == b"\x0a\x01m\x1a\x017\x32\x04\x00\x00\x80?\x32\x00"
    assert pack_stream(body) == b"\x12\x0e" + body
    assert pack_stream(b"", "no") == b"\x0a\x02no\x12\x00"


def test_a_response_too_large_for_grpc_is_refused() -> None:
    class Huge:
        nbytes = 2**31

        def __len__(self) -> int:
            return 2**31

    with pytest.raises(
        InvalidArgument, match=r"^Response has byte size 2147483654 which exceeds gRPC's byte size limit 2147483647\.$"
    ):
        pack(b"", [Huge()])  # type: ignore[list-item]
