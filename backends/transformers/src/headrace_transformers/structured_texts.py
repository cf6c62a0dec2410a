"""Structured outputs: JSON schemas, regular expressions and grammars, by the library llguidance.

At each step, it computes which tokens continue a text that matches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace import InvalidArgument, Unsupported, one_line


class StructuredTexts:
    """Makes the constraints of requests for one tokenizer. Any thread."""

    def __init__(self, tokenizer: Any, vocabulary: int, torch: Any) -> None:
        self._tokenizer, self._vocabulary, self._torch = tokenizer, vocabulary, torch
        self._tokens: Any = None

    def make(self, structured: Mapping[str, Any]) -> TokenConstraint:
        """Return the constraint ``structured``, of `headrace_llm.sampling.CONSTRAINTS`.

        Raises `InvalidArgument` with the reason, and `Unsupported` if llguidance is not installed.
        """
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise Unsupported(
                "structured outputs need the package llguidance: pip install 'headrace-transformers[structured]'"
            ) from None
        if self._tokens is None:
            try:
                self._tokens = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
            except ValueError as error:
                raise Unsupported(f"structured outputs do not work with this tokenizer: {error}") from None
        ((kind, value),) = structured.items()
        limits = llguidance.LLParserLimits()
        matcher = llguidance.LLMatcher(self._tokens, _grammar(llguidance, kind, value), log_level=0, limits=limits)
        if matcher.is_error():
            text = one_line(matcher.get_error())[:500]
            raise InvalidArgument(f"structured_outputs.{kind} cannot be used: {text}")
        return TokenConstraint(self._torch, matcher)


def _grammar(llguidance: Any, kind: str, value: Any) -> str:
    matcher = llguidance.LLMatcher
    try:
        if kind == "json":
            schema = json.loads(value) if type(value) is str else value
            grammar = matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema))
        elif kind == "json_object":
            grammar = matcher.grammar_from_json_schema('{"type": "object"}')
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(value)
        elif kind == "choice":
            grammar = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        else:
            grammar = matcher.grammar_from_lark(value)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"structured_outputs.{kind} cannot be used: {one_line(str(error))[:500]}") from None
    return str(grammar)


class TokenConstraint:
    """The constraint of the text of one request. One thread at a time."""

    def __init__(self, torch: Any, matcher: Any) -> None:
        self._torch, self._matcher = torch, matcher

    def mask(self, scores: Any) -> Any:
        """Return ``scores`` f32[1, vocabulary] with -inf for tokens that do not match."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]].astype(bool)
        mask = self._torch.zeros(scores.shape[-1], dtype=self._torch.bool)
        mask[: len(allowed)] = self._torch.from_numpy(allowed)
        return scores.masked_fill(~mask.to(scores.device), -self._torch.inf)

    def accept(self, token: int) -> bool:
        """Note ``token``. Return True if the text is complete. Raises `InvalidArgument` if the limits of the library
        are reached."""
        if not self._matcher.consume_token(token):
            raise InvalidArgument(f"structured_outputs: {one_line(self._matcher.get_error())[:300]}")
        return bool(self._matcher.is_stopped())
