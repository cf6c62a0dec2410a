"""``/v1/embeddings``: texts or tokens in, a vector for each out.

Source: https://platform.openai.com/docs/api-reference/embeddings, and the ``openai`` client, which requests
base64 by default.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace import BackendError, InferRequest, InferResponse
from headrace_openai.body_members import shown
from headrace_openai.catalog import LanguageModel
from headrace_openai.inferences import MAX_ROWS, encode_text, row_requests
from headrace_openai.language_models import SHORTENS
from headrace_openai.openai_errors import BadMember

#: The most tokens of one text.
_MAX_TOKENS = 1 << 17
#: Beyond this many numbers, they are printed on a thread.
_PRINTED_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """The request of a caller: a vector for each of ``texts``, in UTF-8, or else for each of ``tokens``.

    ``dimensions`` is None for all of a vector.
    """

    texts: Sequence[bytes]
    tokens: Sequence[Sequence[int]]
    is_base64: bool
    dimensions: int | None


def read_embeddings(document: dict[str, Any]) -> EmbeddingsRequest:
    """Return the request in ``document``. Raises `BadMember`."""
    texts, tokens = _rows(document.get("input"))
    form = document.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadMember("encoding_format", f"encoding_format must be float or base64, got {shown(form)}")
    dimensions = document.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise BadMember("dimensions", f"dimensions must be a whole number of at least 1, got {shown(dimensions)}")
    return EmbeddingsRequest(texts, tokens, form == "base64", dimensions)


def _rows(given: Any) -> tuple[list[bytes], list[list[int]]]:
    rows = given if type(given) is list else [given]
    if not rows:
        raise BadMember("input", "input is empty: it is a text, an array of texts, or tokens")
    if type(rows[0]) is int:
        rows = [rows]
    if len(rows) > MAX_ROWS:
        raise BadMember("input", f"input has {len(rows)} texts, the limit is {MAX_ROWS}")
    if all(type(row) is str for row in rows):
        return [encode_text(row, "input") for row in rows], []
    for row in rows:
        if type(row) is not list or not row or any(type(token) is not int for token in row):
            raise BadMember(
                "input",
                f"input must be a text, an array of texts, tokens, or an array of tokens, none empty, got {shown(row)}",
            )
        if len(row) > _MAX_TOKENS:
            raise BadMember("input", f"input has a text of {len(row)} tokens, the limit is {_MAX_TOKENS}")
    return [], rows


def embedding_requests(asked: EmbeddingsRequest, model: LanguageModel, request_id: str) -> list[InferRequest]:
    """Return the requests to ``model`` for all rows. Raises `BadMember` for what it cannot do."""
    if asked.dimensions is not None:
        _check_dimensions(asked.dimensions, model)
    outputs = [spec.name for spec in model.contract.outputs.values()]
    if asked.texts:
        return row_requests(model.view, [(model.contract.inputs["text"], asked.texts)], outputs, request_id)
    spec = model.contract.inputs.get("input_ids")
    if spec is None:
        raise BadMember("input", f"input is tokens, but model '{model.name}' takes texts only: send the text itself")
    most = 2 ** (8 * spec.datatype.numpy.itemsize - 1) - 1
    requests = []
    for row in asked.tokens:
        if not 0 <= min(row) <= max(row) <= most:
            raise BadMember("input", f"input has a token that is none: a token is from 0 to {most}")
        ids = np.array([row] if model.view.max_batch_size > 0 else row, spec.datatype.numpy)
        requests.append(InferRequest(model.name, {spec.name: ids}, outputs, request_id))
    return requests


def _check_dimensions(dimensions: int, model: LanguageModel) -> None:
    parameters = model.view.config.parameters
    whole = model.contract.outputs["embedding"].dims[-1:]
    if whole == (dimensions,):
        return
    if SHORTENS not in parameters or parameters[SHORTENS].string_value.lower() != "true":
        raise BadMember(
            "dimensions",
            f"dimensions is {dimensions}, but the vectors of model '{model.name}' can not be shortened: its parameter "
            f"'{SHORTENS}' is not true",
        )
    if whole and 0 < whole[0] < dimensions:
        raise BadMember("dimensions", f"dimensions is {dimensions}, model '{model.name}' has {whole[0]}")


def vectors_in(
    responses: Sequence[InferResponse], model: LanguageModel, dimensions: int | None
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the vectors f32[rows, dimensions] in ``responses``, and the tokens of all texts; 0 if the model does not
    say it. Shortened vectors have length 1. Raises `BackendError` if they are no vectors of one length."""
    name = model.contract.outputs["embedding"].name
    is_batched = model.view.max_batch_size > 0
    parts = [np.asarray(response.outputs[name], np.float32) for response in responses]
    try:
        vectors = np.concatenate([part.reshape(len(part) if is_batched else 1, -1) for part in parts])
    except ValueError:
        raise BackendError(f"model '{model.name}' gave vectors of several lengths") from None
    if dimensions is not None and dimensions < vectors.shape[1]:
        vectors = vectors[:, :dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    if not np.isfinite(vectors).all():
        raise BackendError(f"model '{model.name}' gave a vector with a number that is not finite")
    return np.ascontiguousarray(vectors, "<f4"), tokens_in(responses, model)


def tokens_in(responses: Sequence[InferResponse], model: LanguageModel) -> int:
    """Return the tokens of the prompts in ``responses``; 0 if the model does not report them."""
    spec = model.contract.outputs.get("num_input_tokens")
    if spec is None:
        return 0
    return sum(int(np.asarray(response.outputs[spec.name]).sum()) for response in responses)


async def print_embeddings(vectors: npt.NDArray[np.float32], tokens: int, model: str, is_base64: bool) -> bytes:
    """Return the answer as JSON. Many numbers are printed on a thread, with the event loop free."""
    if is_base64 or vectors.size <= _PRINTED_AT_ONCE:
        return _print(vectors, tokens, model, is_base64)
    return await asyncio.to_thread(_print, vectors, tokens, model, is_base64)


def _print(vectors: npt.NDArray[np.float32], tokens: int, model: str, is_base64: bool) -> bytes:
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(vector.tobytes()).decode() if is_base64 else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
