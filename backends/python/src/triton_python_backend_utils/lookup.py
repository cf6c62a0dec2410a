"""What a request, a response or a config has under a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triton_python_backend_utils.inference_request import InferenceRequest
from triton_python_backend_utils.inference_response import InferenceResponse
from triton_python_backend_utils.named_tensor import Tensor


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input ``name``, None if the request has no such input."""
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output ``name``, None if the response has no such output."""
    return _named(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The properties of the input ``name``, None if the config has no such input."""
    return _configured(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The properties of the output ``name``, None if the config has no such output."""
    return _configured(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a model of this config may give any number of responses per request."""
    policy = _part(model_config, "model_transaction_policy") or {}
    return bool(policy.get("decoupled", False))


def _named(tensors: Iterable[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor._name == name:
            return tensor
    return None


def _configured(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    entries: Iterable[dict[str, Any]] = _part(model_config, kind) or ()
    return next((entry for entry in entries if entry["name"] == name), None)


def _part(model_config: Any, name: str) -> Any:
    if isinstance(model_config, (str, bytes)):  # ``args["model_config"]`` as it is
        raise TypeError("the config of a model must be a dict, found its text: json.loads makes one of it")
    return model_config.get(name)
