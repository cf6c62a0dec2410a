"""A model that generates text, in a trace: its parts and the time of the first one (docs/text-generation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from headrace import InferResponse

#: The output that such a model has, and the counts of tokens by the attributes that OpenTelemetry has for them.
TEXT = "text_output"
_COUNTS = {"num_input_tokens": "gen_ai.usage.input_tokens", "num_output_tokens": "gen_ai.usage.output_tokens"}


class GeneratedText:
    """The parts of one answer so far. Event loop only."""

    __slots__ = ("_arrival_ns", "_counts", "_parts", "first_ns")

    def __init__(self, arrival_ns: int) -> None:
        self._arrival_ns, self._parts, self._counts = arrival_ns, 0, dict[str, int]()
        self.first_ns = monotonic_ns()

    def add(self, response: InferResponse) -> None:
        """Count ``response``. Its tokens are known only if the caller has requested these outputs."""
        self._parts += 1
        for name, attribute in _COUNTS.items():
            count: Any = response.outputs.get(name)
            if count is not None and count.size == 1:
                value = int(count.item())
                is_sum = name == "num_output_tokens"
                self._counts[attribute] = value + (self._counts.get(attribute, 0) if is_sum else 0)

    def attributes(self) -> Mapping[str, str]:
        """Return the attributes of the span: the parts of the answer, the time to the first in ms, and the tokens."""
        first_ms = (self.first_ns - self._arrival_ns) / 1e6
        attributes = {"headrace.text.parts": str(self._parts), "headrace.text.first_part_ms": f"{first_ms:.3f}"}
        return attributes | {name: str(count) for name, count in self._counts.items()}
