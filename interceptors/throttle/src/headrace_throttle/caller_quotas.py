"""Counts the inferences of each caller, and refuses those beyond its quota.

::

    Throttle.admit -> Quota.take    before the body of an inference is read
    InFlight.ended -> Quota.end     when its last response has been sent
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import ClassVar, TypeAlias

from headrace import AnyOperation, Caller, Interceptor, Operation, Outcome, ResourceExhausted, ServerOptions, Watch
from headrace_throttle.throttle_options import ThrottleOptions

#: Who has a quota: a principal, or an address; which of the two it is, and its text.
Key: TypeAlias = "tuple[str, str]"

#: After this many seconds, a caller with too many inferences in flight may try again.
_RETRY_S = 1


class Quota:
    """The remaining quota of one caller: a token bucket of ``burst`` tokens, and a number of inferences in flight."""

    __slots__ = ("_at_s", "_options", "_tokens", "in_flight")

    def __init__(self, options: ThrottleOptions, now_s: float) -> None:
        self._options, self._at_s, self._tokens, self.in_flight = options, now_s, burst(options), 0

    def take(self, who: str, now_s: float) -> None:
        """Count one inference more. Raises `ResourceExhausted`, and counts nothing, if the quota is used up."""
        limit, rate = self._options.concurrent, self._options.rate
        if limit and self.in_flight >= limit:
            raise ResourceExhausted(
                f"{who} has {limit} inferences in flight, which is the limit", retry_after_s=_RETRY_S
            )
        if rate:
            self._refill(now_s)
            if self._tokens < 1:
                wait_s = (1 - self._tokens) / rate
                raise ResourceExhausted(f"{who} may ask {rate:g} inferences per second", retry_after_s=wait_s)
            self._tokens -= 1
        self.in_flight += 1

    def end(self) -> None:
        """Say that one of the inferences in flight is over."""
        self.in_flight -= 1

    def is_whole(self, now_s: float) -> bool:
        """True if the caller may ask as much as one that was never seen."""
        self._refill(now_s)
        return not self.in_flight and self._tokens >= burst(self._options)

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self._options.rate
        self._tokens, self._at_s = min(self._tokens + gained, burst(self._options)), now_s


class Throttle(Interceptor):
    """Limits the inferences of each caller: of a principal, if an interceptor before this one has named it, or else of
    an address. What models ask on behalf of a caller is part of its inference, and is not counted."""

    name: ClassVar[str] = "throttle"

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(options)
        self._throttle, self._clock = options.group(ThrottleOptions), clock
        #: The callers whose quota is not whole, and some others; the one that asked last is the last.
        self.quotas: OrderedDict[Key, Quota] = OrderedDict()

    @property
    def enabled(self) -> bool:
        return bool(self._throttle.rate or self._throttle.concurrent)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | None:
        if not _is_counted(caller, operation):
            return None
        now_s = self._clock()
        key = ("principal", caller.principal) if caller.principal else ("address", caller.peer)
        quota = self.quotas.get(key)
        if quota is None:
            self._forget(now_s)
            quota = self.quotas[key] = Quota(self._throttle, now_s)
        self.quotas.move_to_end(key)
        quota.take(f"the {key[0]} '{key[1]}'", now_s)
        return InFlight(quota)

    def _forget(self, now_s: float) -> None:
        """Remove at most two callers whose quota is whole, so that the table does not grow with each new caller."""
        for _ in range(2):
            oldest = next(iter(self.quotas), None)
            if oldest is None or not self.quotas[oldest].is_whole(now_s):
                return
            del self.quotas[oldest]


class InFlight(Watch):
    """An inference that counts until it is over."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    def ended(self, outcome: Outcome) -> None:
        self._quota.end()


def burst(options: ThrottleOptions) -> float:
    """Return the number of inferences that may come at once."""
    return options.burst or max(options.rate, 1.0)


def _is_counted(caller: Caller, operation: AnyOperation) -> bool:
    """True for an inference from outside. Each request on a gRPC stream is one; its parent is the stream."""
    if caller.transport in ("program", "model") or operation is Operation.OPEN_STREAM:
        return False
    parent = caller.parent
    return operation.category == "inference" and (parent is None or parent.operation is Operation.OPEN_STREAM)
