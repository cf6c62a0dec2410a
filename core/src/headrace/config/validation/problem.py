"""What a check yields when a config breaks a rule."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import Code


@dataclass(frozen=True, slots=True)
class Problem:
    """``field`` is a path in the config, like ``input[0].dims``; ``message`` is Triton's where it has one."""

    field: str
    message: str
    code: Code = Code.INVALID_ARGUMENT
