"""The choice of the next token of one request, from its scores: the same for continuous batching and ``generate``.

Both pick the highest score. So the choice is made here, and its token gets the only score: each
request has its own random numbers, penalties, constraint and log probabilities, also in a batch with others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace_llm import GenerationRequest, TokenLogprob


class Constraint(Protocol):
    """A constraint of the text."""

    def mask(self, scores: Any) -> Any:
        """Return ``scores`` f32[1, vocabulary] with -inf for tokens that do not match."""

    def accept(self, token: int) -> bool:
        """Note ``token``. Return True if the text is complete: it ends here."""


def config_of(base: Any, request: GenerationRequest, eos: Sequence[int]) -> Any:
    """Return the generation config of ``request``: that of the model, always with the highest score."""
    config = copy.copy(base)
    config.do_sample, config.num_beams, config.num_return_sequences = False, 1, 1
    config.eos_token_id = list(eos) or -1  # none: the model's own would be taken for None
    if request.sampling.repetition_penalty is not None:
        config.repetition_penalty = request.sampling.repetition_penalty
    return config


class TokenChooser:
    """Chooses the tokens of one request. One thread at a time.

    ``processors`` and ``warpers`` are transformers' own; the latter count if ``samples``.
    """

    def __init__(
        self,
        torch: Any,
        request: GenerationRequest,
        prompt: Sequence[int],
        *,
        eos: Sequence[int],
        samples: bool,
        processors: Sequence[Any],
        warpers: Sequence[Any],
        constraint: Constraint | None,
        text_of: Callable[[int], str],
        device: str,
    ) -> None:
        sampling = request.sampling
        self._torch, self._sampling, self._eos = torch, sampling, eos
        self._processors, self._warpers, self._constraint = processors, warpers, constraint
        self._tokens = list(prompt)
        self._counts: dict[int, int] = {}
        self._chosen = 0
        self._text_of = text_of
        wants = request.wants_logprobs or request.wants_cumulative_logprob
        self._logprobs = sampling.logprobs if sampling.logprobs is not None else 0 if wants else -1
        self._biases = (list(sampling.logit_bias), list(sampling.logit_bias.values()))
        self._generator = None
        if samples:
            self._generator = torch.Generator(device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)
        #: Of the last token, if the request asks for log probabilities.
        self.logprob: TokenLogprob | None = None
        #: True if the constraint is satisfied, and takes no further token.
        self.is_complete = False

    def choose(self, scores: Any) -> Any:
        """Return ``scores`` f32[1, vocabulary] with 0 for the chosen token and -inf for all others."""
        torch = self._torch
        if self._processors:
            tokens = torch.tensor([self._tokens], device=scores.device)
            for processor in self._processors:
                scores = processor(tokens, scores)
        given = scores
        scores = self._adjust(scores.clone())
        if self._constraint is not None:
            scores = self._constraint.mask(scores)
        if self._generator is None:
            token = int(scores.argmax())
        else:
            for warper in self._warpers:
                scores = warper(None, scores)
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        self._note(token, given)
        return torch.full_like(given, -torch.inf).index_fill_(1, torch.tensor([token], device=given.device), 0.0)

    def _adjust(self, scores: Any) -> Any:
        sampling, torch = self._sampling, self._torch
        if self._counts and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype, device=scores.device)
            scores[0, list(self._counts)] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self._biases[0]:
            scores[0, self._biases[0]] += torch.tensor(self._biases[1], dtype=scores.dtype, device=scores.device)
        if self._chosen < sampling.min_tokens and self._eos:
            scores[0, list(self._eos)] = -torch.inf
        return scores

    def _note(self, token: int, scores: Any) -> None:
        self._tokens.append(token)
        self._chosen += 1
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._constraint is not None:
            self.is_complete = self._constraint.accept(token)
        if self._logprobs >= 0:
            logprobs = scores[0].log_softmax(-1)
            values, ids = logprobs.topk(self._logprobs) if self._logprobs else (logprobs[:0], logprobs[:0])
            pairs = zip(ids.long().tolist(), values.tolist(), strict=True)
            top = [(each, self._text_of(each), value) for each, value in pairs]
            self.logprob = TokenLogprob(token, self._text_of(token), float(logprobs[token]), top)
