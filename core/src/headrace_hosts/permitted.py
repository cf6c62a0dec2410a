"""Inferences that pass by `Interceptor.permits` and `Interceptor.meters`: their callers, made only if something reads
them, and their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headrace.engine import Caller, Meter, Operation, Permits


def other_header(permits: Permits | None) -> bytes:
    """Return the header that is read in a request without ``authorization``; empty for none."""
    return getattr(permits, "header", b"")


def end(meter: Meter, reply: Callable[[Any], None], answer: Any) -> None:
    """Pass the ``answer`` to an inference to ``reply``. It is the only one: the inference is over."""
    meter.end()
    reply(answer)


class PermittedCaller(Caller):
    """The `Caller` of an inference that was permitted. It is made by ``make`` when its first attribute is read."""

    __slots__ = ("_make", "_permit")

    def __init__(self, make: Callable[[], Caller], principal: str, model: str) -> None:
        self._make: Callable[[], Caller] | None = make
        self._permit = principal, model

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            make = self._make
            if make is None:
                return super().__getattr__(name)
            self._make, made = None, make()
            for each in _FIELDS:
                setattr(self, each, getattr(made, each))
            self.operation, (self.principal, self.model) = Operation.INFER, self._permit
            return getattr(self, name)


#: All but the trace context, which a caller reads when it is first asked for.
_FIELDS = [each.name for each in fields(Caller) if each.name != "trace_context"]
