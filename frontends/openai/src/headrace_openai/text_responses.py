"""The responses of a model that generates text, as parts of an answer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from headrace import BackendError, BytesTensor, Caller, Engine, InferRequest, InferResponse, Tensor
from headrace_llm import GENERATION_OUTPUTS, TokenLogprob, read_logprobs

_NO_REASON = ("", "None")
_Decoder = getincrementaldecoder("utf-8")


@dataclass(slots=True)
class TextPart:
    """A part of an answer: the new text and tokens. ``finish_reason`` is not empty in the last part.

    ``num_input_tokens`` and ``num_output_tokens`` (the new ones) are None if the model does not report them.
    """

    text: str = ""
    finish_reason: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    tool_calls: Sequence[dict[str, Any]] = ()
    reasoning: str = ""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


async def parts_of(engine: Engine, request: InferRequest, caller: Caller | None) -> AsyncIterator[TextPart]:
    """Yield the parts of the answer to ``request``, the last one with a ``finish_reason``.

    Closing it cancels the request. Raises `HeadraceError`.
    """
    reader = _TextReader()
    async with aclosing(engine.responses(request, caller)) as responses:  # type: ignore[type-var]
        async for response in responses:
            yield reader.read(response)
    if (last := reader.rest()) is not None:
        yield last


class _TextReader:
    """Reads the responses to one request."""

    __slots__ = ("_decode", "_has_finished")

    def __init__(self) -> None:
        self._decode = _Decoder("replace").decode
        self._has_finished = False

    def read(self, response: InferResponse) -> TextPart:
        outputs = response.outputs
        given = outputs.get("text_output")
        part = TextPart(self._decode(_bytes(given)) if given is not None else "")
        for name, tensor in outputs.items():
            if name in _READERS:
                try:
                    _READERS[name](part, tensor)
                except ValueError as error:
                    raise BackendError(
                        f"model '{response.model_name}': output '{name}' can not be read: {error}"
                    ) from None
        if part.finish_reason:
            self._has_finished = True
            part.text += self._decode(b"", True)
        return part

    def rest(self) -> TextPart | None:
        """Return a last part if no part had a ``finish_reason``."""
        return None if self._has_finished else TextPart(self._decode(b"", True), "stop")


def _read_reason(part: TextPart, tensor: Tensor) -> None:
    reason = _bytes(tensor).decode(errors="replace")
    if reason not in _NO_REASON:
        part.finish_reason = reason


def _read_logprobs(part: TextPart, tensor: Tensor) -> None:
    if (text := _bytes(tensor)) not in (b"", b"null"):
        part.logprobs = read_logprobs(text)


def _read_tool_calls(part: TextPart, tensor: Tensor) -> None:
    if text := _bytes(tensor):
        part.tool_calls = orjson.loads(text)


def _read_reasoning(part: TextPart, tensor: Tensor) -> None:
    part.reasoning = _bytes(tensor).decode(errors="replace")


def _read_input_tokens(part: TextPart, tensor: Tensor) -> None:
    part.num_input_tokens = _sum(tensor)


def _read_output_tokens(part: TextPart, tensor: Tensor) -> None:
    part.num_output_tokens = _sum(tensor)


_READERS = {
    "finish_reason": _read_reason,
    "logprobs": _read_logprobs,
    "num_input_tokens": _read_input_tokens,
    "num_output_tokens": _read_output_tokens,
    "reasoning": _read_reasoning,
    "tool_calls": _read_tool_calls,
}
assert _READERS.keys() <= GENERATION_OUTPUTS.keys()


def _bytes(tensor: Tensor) -> bytes:
    """Return the strings of ``tensor`` as one."""
    if not isinstance(tensor, BytesTensor):
        return b""
    if tensor.shape in ((1,), (1, 1)):  # its length, and then the string
        return bytes(tensor.buffer[4:])
    return b"".join(tensor.items())


def _sum(tensor: Tensor) -> int:
    return int(tensor.item() if isinstance(tensor, np.ndarray) and tensor.size == 1 else np.asarray(tensor).sum())
