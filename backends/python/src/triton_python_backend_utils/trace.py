"""The trace of a request."""

from __future__ import annotations


class InferenceTrace:
    """Which trace a request belongs to; hand it on to the requests that a model makes."""

    __slots__ = ("_context",)

    def __init__(self) -> None:
        self._context: str | None = None

    def get_context(self) -> str | None:
        """The context of OpenTelemetry as text, None if the request is not traced by it."""
        return self._context
