"""An `InferResponse` to a serialized ``ModelInferResponse`` (behaviours.md section 2.4)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.frontends import classification
from penstock.frontends.grpc import parameters, wire
from penstock.frontends.grpc.grpc_service_pb2 import ModelInferResponse
from penstock.messages.response import InferResponse
from penstock.messages.tensor import BytesTensor, Tensor, data_type, wire_view
from penstock.models.served import ServedModel

_FINAL = "triton_final_response"
_NO_CLASSES: Mapping[str, int] = {}


def encode(
    response: InferResponse,
    model: ServedModel,
    classes: Mapping[str, int] = _NO_CLASSES,
    final: bool | None = None,
) -> bytes:
    """``response`` on the wire; tensor bytes are copied once, into the result.

    ``classes`` maps outputs to the number of classes to send in place of the tensor. ``final`` is
    what streams say about their responses. Raises `InvalidArgument` for an output that cannot
    be classified and for a response too large for gRPC, `PluginError` for a parameter that
    cannot be sent.
    """
    header = ModelInferResponse(model_name=response.model_name, model_version=response.model_version, id=response.id)
    if response.parameters:
        parameters.write(response.parameters, header.parameters)
    if final is not None:
        header.parameters[_FINAL].bool_param = final
    tensors, size = [], 0
    for name, tensor in response.outputs.items():
        if name in classes:
            tensor = _classify(tensor, name, classes[name], model)
        header.outputs.add(name=name, datatype=data_type(tensor).name, shape=tensor.shape)
        tensors.append(tensor)
        size += tensor.nbytes
    if size > wire.SPLIT_BYTES:
        return wire.pack(header, [wire_view(tensor) for tensor in tensors])
    header.raw_output_contents.extend([_wire_bytes(tensor) for tensor in tensors])
    return header.SerializeToString()


def encode_empty(id: str, model_name: str = "", model_version: str = "", final: bool | None = None) -> bytes:
    """A response without outputs: the end of a decoupled request, or the body of an error."""
    header = ModelInferResponse(model_name=model_name, model_version=model_version, id=id)
    if final is not None:
        header.parameters[_FINAL].bool_param = final
    return header.SerializeToString()


def _wire_bytes(tensor: Tensor) -> bytes:
    """`wire_view`, copied: for what is small, a quarter of the cost."""
    return tensor.buffer.tobytes() if isinstance(tensor, BytesTensor) else tensor.tobytes()


def _classify(tensor: Tensor, name: str, count: int, model: ServedModel) -> Tensor:
    return classification.classify(tensor, count, model.labels.get(name, ()), model.max_batch_size > 0)
