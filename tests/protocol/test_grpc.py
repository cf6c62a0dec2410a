"""Raw gRPC: messages below the client, to the letter of docs/spec/behaviours.md section 2."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

RID = "[request id: <id_unknown>] "
Parameter = pb.InferParameter


def tensor(name: str = "IN", datatype: str = "FP32", shape: tuple[int, ...] = (4,), **rest: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **rest)


def ask(model: str = "echo_fp32", *inputs: Any, raw: tuple[bytes, ...] | None = None, **rest: Any) -> Any:
    """A request; without anything else, four zeros for IN."""
    inputs = inputs or (tensor(),)
    contents = [bytes(16)] * len(inputs) if raw is None else list(raw)
    return pb.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=contents, **rest)


def typed(**fields: Any) -> Any:
    return pb.InferTensorContents(**fields)


def wanted(name: str = "OUT", **parameters: Any) -> Any:
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details() or ""


def test_the_answer_has_raw_contents_only(stub: Any) -> None:
    answer = stub.ModelInfer(ask(id="a"))
    assert (answer.id, answer.model_name, answer.model_version) == ("a", "echo_fp32", "1")
    assert list(answer.raw_output_contents) == [bytes(16)]
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("OUT", "FP32", [4])
    assert not output.HasField("contents")


@pytest.mark.parametrize(("datatype", "field", "values", "content"), [
    ("BOOL", "bool_contents", [True, False], b"\x01\x00"),
    ("INT8", "int_contents", [-1, 300], b"\xff\x2c"),  # cut to the width
    ("INT16", "int_contents", [-1, 70000], b"\xff\xff\x70\x11"),
    ("INT32", "int_contents", [-2, 3], struct.pack("<2i", -2, 3)),
    ("INT64", "int64_contents", [-(2**63), 1], struct.pack("<2q", -(2**63), 1)),
    ("UINT8", "uint_contents", [255, 256], b"\xff\x00"),
    ("UINT16", "uint_contents", [65535, 65537], b"\xff\xff\x01\x00"),
    ("UINT32", "uint_contents", [2**32 - 1, 0], struct.pack("<2I", 2**32 - 1, 0)),
    ("UINT64", "uint64_contents", [2**64 - 1, 0], struct.pack("<2Q", 2**64 - 1, 0)),
    ("FP32", "fp32_contents", [0.5, -1.5], struct.pack("<2f", 0.5, -1.5)),
    ("FP64", "fp64_contents", [0.5, -1.5], struct.pack("<2d", 0.5, -1.5)),
    ("BYTES", "bytes_contents", [b"ab", b""], b"\x02\x00\x00\x00ab\x00\x00\x00\x00"),
])  # fmt: skip
def test_typed_contents_become_the_same_bytes(
    stub: Any, datatype: str, field: str, values: list[Any], content: bytes
) -> None:
    request = ask(f"echo_{datatype.lower()}", tensor("IN", datatype, (2,), contents=typed(**{field: values})), raw=())
    assert list(stub.ModelInfer(request).raw_output_contents) == [content]


def test_raw_contents_beyond_the_inputs_are_ignored(stub: Any) -> None:
    assert list(stub.ModelInfer(ask(raw=(bytes(16), b"more"))).raw_output_contents) == [bytes(16)]


def test_outputs_without_elements_have_an_empty_entry(stub: Any) -> None:
    assert list(stub.ModelInfer(ask("echo_fp32", tensor(shape=(0,)), raw=(b"",))).raw_output_contents) == [b""]


def test_binary_data_output_is_a_parameter_like_any_other(stub: Any) -> None:
    assert stub.ModelInfer(ask(parameters={"binary_data_output": Parameter(bool_param=False)})).raw_output_contents


INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
REFUSED: list[tuple[Any, grpc.StatusCode, str]] = [
    (ask("nosuch"), NOT_FOUND, "Request for unknown model: 'nosuch' is not found"),
    (ask(model_version="7"), NOT_FOUND, "Request for unknown model: 'echo_fp32' version 7 is not found"),
    (ask(model_version="x"), INVALID, "failed to get model version from specified version string 'x'"),
    (ask(model_version="-1"), INVALID,
     "invalid model version specified '-1' , version should be an integral value > 0"),
    (ask(parameters={"sequence_id": Parameter(bool_param=True)}), INVALID,
     "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
    (ask(parameters={"sequence_start": Parameter(int64_param=1)}), INVALID,
     "invalid value type for 'sequence_start' parameter, expected bool_param."),
    (ask(parameters={"priority": Parameter(int64_param=-1)}), INVALID,
     "invalid value for 'priority', expected value >= 0."),
    (ask(parameters={"priority": Parameter(string_param="1")}), INVALID,
     "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
    (ask(parameters={"timeout": Parameter(uint64_param=1)}), INVALID,
     "invalid value type for 'timeout' parameter, expected int64_param."),
    (ask(parameters={"triton_x": Parameter(bool_param=True)}), INVALID,
     "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
     "'triton_' are allowed: triton_enable_empty_final_response"),
    (ask(parameters={"x": Parameter()}), INVALID,
     "invalid value type for 'x' parameter, expected int64_param, bool_param, or string_param."),
    (ask(raw=()), INVALID, "unable to find data for input tensor 'IN' for model 'echo_fp32' in request."),
    (ask("echo_fp32", tensor(contents=typed(fp32_contents=[1, 2, 3, 4]))), INVALID,
     "contents field must not be specified when using raw_input_contents for 'IN' for model 'echo_fp32'"),
    (ask("echo_fp32", tensor(contents=typed(fp32_contents=[1], int_contents=[1])), raw=()), INVALID,
     "unexpected explicit tensor data for input tensor 'IN' for model 'echo_fp32'"),
    (ask("echo_fp32", tensor(contents=typed(int_contents=[1, 2, 3, 4])), raw=()), INVALID,
     "unexpected explicit tensor data for input tensor 'IN' for model 'echo_fp32' of type 'INT32', expected datatype "
     "'FP32'"),
    (ask("echo_fp32", tensor(contents=typed()), raw=()), INVALID,
     RID + "input byte size mismatch for input 'IN' for model 'echo_fp32'. Expected 16, got 0"),
    (ask("echo_fp32", tensor(contents=typed(fp32_contents=[1, 2])), raw=()), INVALID,
     RID + "input byte size mismatch for input 'IN' for model 'echo_fp32'. Expected 16, got 8"),
    (ask("echo_fp32", tensor(parameters={"shared_memory_region": Parameter(bool_param=True)}), raw=()), INVALID,
     "invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected string_param."),
    (ask(outputs=[wanted(classification=Parameter(bool_param=True))]), INVALID,
     "invalid value type for 'classification' parameter, expected int64_param"),
    (ask(outputs=[wanted(classification=Parameter(int64_param=-1))]), INVALID,
     "invalid value for 'classification' parameter, expected >= 0"),
    (ask(outputs=[wanted(classification=Parameter(int64_param=0))]), INVALID,
     "invalid value for 'classification' parameter, expected >= 0"),
    (ask(outputs=[wanted(), wanted()]), INVALID, RID + "output 'OUT' already exists in request"),
    (ask(outputs=[wanted("NONE")]), INVALID, "unexpected inference output 'NONE' for model 'echo_fp32'"),
    (ask("echo_fp32", tensor(), tensor()), INVALID, RID + "input 'IN' already exists in request"),
    (ask("echo_fp32", tensor("ON")), INVALID, "unexpected inference input 'ON' for model 'echo_fp32'"),
    (ask("echo_fp32", tensor(datatype="FP33")), INVALID, ""),
    (ask("echo_fp32", tensor(datatype="INT32"), id="7"), INVALID,
     "[request id: 7] inference input 'IN' data-type is 'INT32', but model 'echo_fp32' expects 'FP32'"),
    (ask("echo_fp32", tensor(shape=(-1,))), INVALID,
     RID + "All input dimensions should be specified for input 'IN' for model 'echo_fp32', got [-1]"),
    (ask("echo_fp32", tensor(shape=(5,))), INVALID,
     RID + "input byte size mismatch for input 'IN' for model 'echo_fp32'. Expected 20, got 16"),
    (ask("matrix", tensor(datatype="INT32", shape=(2, 2))), INVALID,
     RID + "unexpected shape for input 'IN' for model 'matrix'. Expected [-1,3], got [2,2]. "),
    (ask("matrix", tensor(datatype="INT32", shape=(1,) * 65), raw=(bytes(4),)), INVALID,
     RID + "unexpected shape for input 'IN' for model 'matrix'. Expected [-1,3], got [1,1"),
    (ask("echo_fp32", tensor(shape=(2**62, 2**62))), INVALID, ""),
    (ask("echo_fp32", tensor(shape=(2**63 - 1,) * 300_000)), INVALID, ""),  # its product has 18 million digits
    (ask("echo_bytes", tensor(datatype="BYTES", shape=(1,)), raw=(b"\x01\x00",)), INVALID,
     RID + "incomplete string length indicator for inference input 'IN' for model 'echo_bytes', expecting 4 bytes but "
     "only 2 bytes available. Please make sure the string length indicator is in one buffer."),
]  # fmt: skip


@pytest.mark.parametrize(("message", "code", "text"), REFUSED, ids=range(len(REFUSED)))
def test_a_request_is_refused_in_tritons_words(stub: Any, message: Any, code: grpc.StatusCode, text: str) -> None:
    actual, details = refusal(lambda: stub.ModelInfer(message, timeout=30))
    assert (actual, details[: len(text)]) == (code, text)


UNSUPPORTED = grpc.StatusCode.UNIMPLEMENTED
CALLS: list[tuple[str, Any, grpc.StatusCode, str]] = [
    ("ModelMetadata", pb.ModelMetadataRequest(name="nosuch"), NOT_FOUND, "'nosuch' is not found"),
    ("ModelConfig", pb.ModelConfigRequest(name="add", version="2"), NOT_FOUND, "'add' version 2 is not found"),
    ("ModelStatistics", pb.ModelStatisticsRequest(name="nosuch"), INVALID, "requested model 'nosuch' is not available"),
    ("ModelStatistics", pb.ModelStatisticsRequest(name="add", version="2"), INVALID,
     "requested model version is not available for model 'add'"),
    ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="r"), UNSUPPORTED,
     "'repository_name' specification is not supported"),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="r", model_name="add"), UNSUPPORTED,
     "'repository_name' specification is not supported"),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(
        model_name="add", parameters={"x": pb.ModelRepositoryParameter(bool_param=True)}), INVALID,
     "unrecognized load parameter 'x'."),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(
        model_name="add", parameters={"config": pb.ModelRepositoryParameter(bool_param=True)}), INVALID,
     "invalid value type for load parameter 'config', expected string_param."),
    ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(
        model_name="add", parameters={"unload_dependents": pb.ModelRepositoryParameter(int64_param=1)}), INVALID,
     "invalid value type for 'unload_dependents' parameter, expected bool_param."),
    ("TraceSetting", pb.TraceSettingRequest(
        settings={"trace_file": pb.TraceSettingRequest.SettingValue(value=["/tmp/x"])}), UNSUPPORTED,
     "trace file location can not be updated through network protocol"),
    ("LogSettings", pb.LogSettingsRequest(
        settings={"log_file": pb.LogSettingsRequest.SettingValue(string_param="/tmp/x")}), UNSUPPORTED,
     "log file location can not be updated through network protocol"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "message", "code", "text"), CALLS, ids=range(len(CALLS)))
def test_a_call_is_refused_in_tritons_words(
    stub: Any, method: str, message: Any, code: grpc.StatusCode, text: str
) -> None:
    actual, details = refusal(lambda: getattr(stub, method)(message))
    assert (actual, details.removeprefix("Request for unknown model: ")) == (code, text)


def test_bytes_that_are_no_message_affect_no_client(server: Any, stub: Any) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        for content in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
            assert refusal(lambda content=content: call(content))[0] in (grpc.StatusCode.INTERNAL, INVALID)  # type: ignore[misc]
    assert stub.ModelInfer(ask()).model_name == "echo_fp32"


def test_an_unknown_method_is_unimplemented(server: Any) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/Nothing", None, None)
        assert refusal(lambda: call(b""))[0] is UNSUPPORTED


def test_the_standard_health_service_serves(server: Any) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


# ---------------------------------------------------------------------- streams


def test_a_stream_answers_in_order_and_survives_errors(stub: Any) -> None:
    requests = [ask("scalar", tensor(shape=(4, 1)), id="0"), ask(id="1"), ask("nosuch", id="2"),
             ask("echo_fp32", tensor("ON"), id="3"), ask("batched", tensor(shape=(1, 4)), id="4")]  # fmt: skip
    answers = list(stub.ModelStreamInfer(iter(requests), timeout=30))
    assert [answer.infer_response.id for answer in answers] == ["0", "1", "2", "3", "4"]
    texts = ["", "", "Request for unknown model: 'nosuch' is not found",
             "unexpected inference input 'ON' for model 'echo_fp32'", ""]  # fmt: skip
    assert [answer.error_message for answer in answers] == texts
    for answer, text in zip(answers, texts, strict=True):
        parameters = answer.infer_response.parameters
        # a request refused before it is queued has no final flag
        assert ("triton_final_response" in parameters) is not bool(text)
        assert text or parameters["triton_final_response"].bool_param is True
        assert text == "" or not answer.infer_response.outputs


def test_a_stream_of_nothing_ends_well(stub: Any) -> None:
    assert list(stub.ModelStreamInfer(iter(()), timeout=30)) == []


def test_a_stream_may_carry_many_requests(stub: Any) -> None:
    ids = [str(number) for number in range(300)]
    answers = stub.ModelStreamInfer((ask(id=each) for each in ids), timeout=30)
    assert [answer.infer_response.id for answer in answers] == ids
