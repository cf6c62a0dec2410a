"""A server over gRPC. It needs grpcio, the extra ``grpc`` of this distribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.json_format import MessageToDict

from headrace import grpc_service_pb2 as pb
from headrace_compare.answers import NO_ANSWER, ServerAnswer, Unreachable
from headrace_compare.named_tensors import BadTensor, NamedTensor
from headrace_compare.request_headers import as_metadata
from headrace_compare.request_sources import ComparedRequest

_SERVICE = "/inference.GRPCInferenceService"
_DOCUMENTS = {
    "server": "ServerMetadata",
    "index": "RepositoryIndex",
    "metadata": "ModelMetadata",
    "config": "ModelConfig",
    "statistics": "ModelStatistics",
}
#: The field of the values of a response without raw bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class GrpcTarget:
    """A server at a ``grpc://`` or ``grpcs://`` address."""

    protocol = "grpc"

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        self._headers = as_metadata(headers)
        parts = urlsplit(url)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if parts.scheme == "grpcs":
            self._channel = grpc.secure_channel(parts.netloc, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options)

    def document(self, kind: str, model: str = "", version: str = "") -> tuple[str, Any]:
        name = _DOCUMENTS[kind]
        request = getattr(pb, f"{name}Request")()
        if model:
            request.name, request.version = model, version
        call = self._channel.unary_unary(
            f"{_SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(pb, f"{name}Response").FromString,
        )
        try:
            response = call(request, timeout=self._timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and kind == "server":
                raise Unreachable(f"{self.url}: {error.details()}") from error
            return error.code().name, {"error": error.details()}
        document = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return "OK", document.get("config", document) if kind == "config" else document

    def infer(self, request: ComparedRequest, *, is_stream: bool) -> list[ServerAnswer]:
        try:
            message = _encoded(request)
        except (TypeError, ValueError) as error:  # a number that protobuf does not have
            return [ServerAnswer("not sent", f"gRPC does not carry the request: {error}")]
        metadata = (*self._headers, *as_metadata(request.headers))
        if is_stream:
            return list(self._stream(message, metadata))
        call = self._channel.unary_unary(
            f"{_SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        try:
            return [_decoded(call(message, timeout=self._timeout_s, metadata=metadata))]
        except grpc.RpcError as error:
            return [_failed(error)]

    def _stream(self, message: pb.ModelInferRequest, metadata: tuple[tuple[str, str], ...]) -> Iterator[ServerAnswer]:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._channel.stream_stream(
            f"{_SERVICE}/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        try:
            for each in call(iter([message]), timeout=self._timeout_s, metadata=metadata):
                if each.error_message:
                    yield ServerAnswer("stream error", each.error_message)
                else:
                    yield _decoded(each.infer_response)
        except grpc.RpcError as error:
            yield _failed(error)

    def close(self) -> None:
        self._channel.close()


def _encoded(request: ComparedRequest) -> pb.ModelInferRequest:
    body = request.body
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=str(body.get("id", "")))
    _set(message.parameters, body.get("parameters", {}))
    for tensor, member in zip(request.inputs, body["inputs"], strict=True):
        added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        _set(added.parameters, member.get("parameters", {}))
        message.raw_input_contents.append(tensor.wire_bytes())
    for member in body.get("outputs", ()):
        _set(message.outputs.add(name=member["name"]).parameters, member.get("parameters", {}))
    return message


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            parameters[name].int64_param = value
        elif isinstance(value, int | float):
            parameters[name].double_param = value
        else:
            parameters[name].string_param = str(value)


def _decoded(response: pb.ModelInferResponse) -> ServerAnswer:
    fields: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        fields["id"] = response.id
    values = MessageToDict(response).get("parameters", {})
    parameters = {name: next(iter(value.values()), None) for name, value in values.items()}
    outputs = list[NamedTensor]()
    try:
        for at, each in enumerate(response.outputs):
            if at < len(response.raw_output_contents):
                data = response.raw_output_contents[at]
                outputs.append(NamedTensor.from_bytes(each.name, each.datatype, each.shape, data))
            else:
                values = list(getattr(each.contents, _CONTENTS[each.datatype]))
                values = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values]
                document = {"name": each.name, "datatype": each.datatype, "shape": list(each.shape), "data": values}
                outputs.append(NamedTensor.from_json(document))
    except (BadTensor, LookupError) as error:
        return ServerAnswer("OK", f"no answer of the protocol: {error}", fields)
    if parameters:
        fields["parameters"] = parameters
    return ServerAnswer("OK", "", fields, outputs=tuple(outputs))


def _failed(error: grpc.RpcError) -> ServerAnswer:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerAnswer(NO_ANSWER, "no answer in time")
    return ServerAnswer(code.name, error.details() or "")
