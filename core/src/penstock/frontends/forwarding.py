"""Forwarding of request headers to models as request parameters (behaviours.md section 1.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.errors import InvalidArgument, OperatorError

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


class HeaderForwarding:
    """Which headers become parameters: those whose name matches the operator's pattern.

    An empty pattern forwards nothing. Raises `OperatorError` if the pattern is malformed.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None
        except re.error as error:
            raise OperatorError(f"header forward pattern '{pattern}' is malformed: {error}") from None

    def __bool__(self) -> bool:
        return self._pattern is not None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """The parameters that ``headers`` give; raises `InvalidArgument` for a reserved name."""
        if self._pattern is None:
            return {}
        chosen = {name: value for name, value in headers if self._pattern.search(name)}
        for name in chosen:
            if name.lower() in _RESERVED or name.lower().startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return chosen
