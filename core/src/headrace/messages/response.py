"""One answer to an inference request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.errors import HeadraceError
from headrace.messages.tensor import Tensor


@dataclass(slots=True, eq=False)
class InferResponse:
    """``outputs`` in the order the model declares them, restricted to those requested.

    Backends may leave ``model_name``, ``model_version`` and ``id`` empty: core fills them in.
    ``parameters`` values are str, int, bool or float.
    """

    outputs: Mapping[str, Tensor]
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)
    model_name: str = ""
    model_version: str = ""
    id: str = ""


#: What a request is given; None ends one whose responses have already gone out.
Answer: TypeAlias = InferResponse | HeadraceError | None
