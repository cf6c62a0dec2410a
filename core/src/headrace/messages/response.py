"""An answer to an inference request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.errors import HeadraceError
from headrace.messages.tensor import Tensor


@dataclass(slots=True, eq=False)
class InferResponse:
    """A response: ``outputs`` are the requested ones, in the order in which the model declares them.

    Backends may leave ``model_name``, ``model_version`` and ``id`` empty: core fills them in. The values of
    ``parameters`` are str, int, bool or float.
    """

    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)
    model_name: str = ""
    model_version: str = ""
    id: str = ""


#: An answer to a request: a response, an error, or None as the last answer if all responses have been sent.
Answer: TypeAlias = InferResponse | HeadraceError | None
