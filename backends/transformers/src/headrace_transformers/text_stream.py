"""From tokens to text: complete characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace_llm import StopStrings, piece_text

#: A blank in tokens of SentencePiece.
_BLANK = "\u2581"


class TextStream:
    """The text of one answer, as it grows. One thread at a time.

    What may be the beginning of a character or of a string of ``stop`` is held back until the next tokens decide.
    """

    def __init__(self, decode: Callable[[int], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, StopStrings(stop)

    @property
    def has_stopped(self) -> bool:
        """True if a stop string was found: the text has ended before it."""
        return self._stops.has_stopped

    def add(self, token: int) -> str:
        """Return the text that ``token`` completes."""
        return self._stops.feed(self._decode(token))

    def rest(self) -> str:
        """Return the text that was held back. The answer ends here."""
        return self._stops.rest()


def decoder_of(tokenizer: Any) -> Callable[[int], str]:
    """Return a function from the next token of one answer to the text that it completes. Special tokens have none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _by_pieces(tokenizer) if backend is None else _by_stream(backend)


def _by_stream(backend: Any) -> Callable[[int], str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)

    def decode(token: int) -> str:
        nonlocal stream
        try:
            return stream.step(backend, token) or ""
        except Exception:  # the library's own class: the text of earlier tokens has changed, so begin anew
            stream = DecodeStream(skip_special_tokens=True)
            return stream.step(backend, token) or ""

    return decode


def _by_pieces(tokenizer: Any) -> Callable[[int], str]:
    """For tokenizers in Python: decode the last tokens with and without the new one, as vLLM does."""
    tokens: list[int] = []
    start = read = 0

    def decode(token: int) -> str:
        nonlocal start, read
        tokens.append(token)
        before = tokenizer.decode(tokens[start:read], skip_special_tokens=True)
        now: str = tokenizer.decode(tokens[start:], skip_special_tokens=True)
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        start, read = read, len(tokens)
        return now[len(before) :]

    return decode


def text_of(tokenizer: Any, token: int) -> str:
    """Return the text of ``token`` as in `TokenLogprob`: with the blank that it begins with, and all of its bytes."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) or ""
    if "\ufffd" not in text:
        return f" {text}" if piece.startswith(_BLANK) and not text.startswith(" ") else text
    return piece_text(piece, text)
