"""The instances of models that make embeddings or rank documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace import (
    BackendError,
    BytesTensor,
    HeadraceError,
    InferRequest,
    InferResponse,
    InvalidArgument,
    Model,
    RequestInstance,
)
from headrace_llamacpp.chunks import error_of


class _Vectors(RequestInstance):
    """Calls ``engine``, an ``xllamacpp.Server``, once per request."""

    def __init__(self, model: Model, engine: Any) -> None:
        self._engine: Any = engine
        self.concurrency = model.parameters.slots

    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._engine = None  # its end

    def _answer(self, request: InferRequest) -> InferResponse | HeadraceError:
        try:
            return InferResponse(self._outputs(request))
        except HeadraceError as error:
            return error

    def _outputs(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        raise NotImplementedError


class EmbeddingInstance(_Vectors):
    """``text`` or ``input_ids`` to ``embedding``."""

    def _outputs(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        if ("text" in request.inputs) == ("input_ids" in request.inputs):
            raise InvalidArgument("a request has either text or input_ids")
        tokens = request.inputs.get("input_ids")
        given = _text(request, "text") if tokens is None else np.asarray(tokens).ravel().tolist()
        found = _ask(self._engine.handle_embeddings, {"input": given})
        return {"embedding": np.array(found["data"][0]["embedding"], np.float32), "num_input_tokens": _count(found)}


class RerankingInstance(_Vectors):
    """``query`` and ``document`` to ``score``."""

    def _outputs(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        body = {"query": _text(request, "query"), "documents": [_text(request, "document")]}
        found = _ask(self._engine.handle_rerank, body)
        score = np.array([found["results"][0]["relevance_score"]], np.float32)
        return {"score": score, "num_input_tokens": _count(found)}


def _count(found: Any) -> np.ndarray[Any, Any]:
    return np.array([found["usage"]["prompt_tokens"]], np.uint32)


def _text(request: InferRequest, name: str) -> str:
    tensor = request.inputs[name]
    items = tensor.items() if isinstance(tensor, BytesTensor) else []
    if len(items) != 1:
        raise InvalidArgument(f"input '{name}' must be one string")
    try:
        text: str = items[0].decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' is not UTF-8: {error}") from None
    if not text:
        raise InvalidArgument(f"input '{name}' is empty")
    return text


def _ask(handle: Callable[..., Any], body: dict[str, Any]) -> Any:
    """Return the one answer of llama.cpp. Raises `HeadraceError`."""
    try:
        given = handle(body)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"llama.cpp: {str(error)[:500]}") from None
    if type(given) is not dict:
        raise BackendError(f"llama.cpp: {str(given)[:500]}")
    if "error" in given:
        raise error_of(given["error"])
    return given
