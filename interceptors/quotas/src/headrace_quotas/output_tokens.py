"""Output tokens that models report in the output ``num_output_tokens``, as in Triton's contract for vLLM."""

from __future__ import annotations

import numpy as np

from headrace import Answer, InferRequest, InferResponse, ModelView, Watch
from headrace_quotas.fair_gate import Use

#: The output with the number of new tokens in each response.
TOKENS = "num_output_tokens"
#: The output with the number of prompt tokens. An engine on headrace-llm sends it in the last response of a failed
#: request.
INPUT_TOKENS = "num_input_tokens"
#: The input that requests it.
ASK = f"return_{TOKENS}"


class TokenCounter(Watch):
    """Counts the tokens in the answers to a request of ``use``.

    If the request fails or its caller disconnects, it also counts the prompt tokens that the model reports.
    """

    is_late = True
    __slots__ = ("_input", "_use")

    def __init__(self, use: Use) -> None:
        self._use, self._input = use, 0

    def answered(self, answer: Answer, final: bool) -> None:
        if isinstance(answer, InferResponse):
            self._use.charge_tokens(tokens_in(answer))
            if INPUT_TOKENS in answer.outputs:
                self._input = number_in(answer, INPUT_TOKENS) or 0
        elif final and answer is not None and self._input:
            self._use.charge_tokens(self._input)


def reports_tokens(model: ModelView) -> bool:
    """True if the responses of ``model`` count as tokens: the number that each reports, or one each if it is
    decoupled."""
    return model.decoupled or TOKENS in model.outputs


def tokens_in(response: InferResponse) -> int:
    """Return the tokens that ``response`` reports, or 1 if it reports none."""
    reported = number_in(response, TOKENS)
    return 1 if reported is None else reported


def number_in(response: InferResponse, name: str) -> int | None:
    """Return the sum of the numbers in output ``name``, at least 0. None if it has no integers."""
    reported = response.outputs.get(name)
    if not isinstance(reported, np.ndarray) or reported.dtype.kind not in "iu":
        return None
    return max(0, int(reported.sum()))


def requesting_tokens(request: InferRequest, model: ModelView) -> InferRequest | None:
    """Return ``request`` changed so that the model reports its tokens. None if it does already, or cannot.

    Otherwise a caller could evade the limit by not requesting the number.
    """
    input_spec = model.inputs.get(ASK)
    if input_spec is None or TOKENS not in model.outputs:
        return None
    changed = None
    value = request.inputs.get(ASK)
    if not (isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.all()):
        shape = tuple(1 if size < 0 else size for size in input_spec.dims)
        first = next(iter(request.inputs.values()), None)
        if model.max_batch_size and first is not None and first.shape:
            shape = (first.shape[0], *shape)
        changed = request.with_inputs({**request.inputs, ASK: np.ones(shape, np.bool_)})
    if request.outputs and TOKENS not in request.outputs:
        changed = (changed or request).with_outputs((*request.outputs, TOKENS))
    return changed
