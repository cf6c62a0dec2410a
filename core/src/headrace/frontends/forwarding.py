"""Forwarding of request headers to models as request parameters (docs/spec/behaviours.md section 1.3)."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.config.options import header_pattern
from headrace.errors import InvalidArgument, OperatorError

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


class HeaderForwarding:
    """Which headers become parameters: those whose name the operator's pattern finds.

    An empty pattern forwards nothing. Raises `OperatorError` if the pattern is malformed.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._finds = header_pattern(pattern) if pattern else None
        except ValueError as error:
            raise OperatorError(f"headers cannot be forwarded: {error}") from None

    def __bool__(self) -> bool:
        return self._finds is not None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """The parameters that ``headers`` give; raises `InvalidArgument` for a reserved name."""
        if self._finds is None:
            return {}
        chosen = {name: value for name, value in headers if self._finds(name)}
        for name in chosen:
            if name.lower() in _RESERVED or name.lower().startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return chosen
