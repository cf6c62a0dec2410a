"""The limits and the use of principals: token buckets, and the requests in flight. Event loop only."""

from __future__ import annotations

from math import inf
from sys import maxsize
from typing import NamedTuple, TypeAlias

from headrace import one_line
from headrace_quotas.counters import Counters
from headrace_quotas.quota_file import Quota, QuotaBook, QuotaLimits

#: A principal, or an address in a tuple, so that a principal cannot collide with an address.
TenantKey: TypeAlias = "str | tuple[str]"
#: Rounding must not refuse the last request of a burst.
_ROUNDING_S = 1e-9
#: A caller with too many requests in flight may try again after this time.
RETRY_S = 1.0


class QuotaRefusal(NamedTuple):
    """The reason of a refusal, and the seconds after which the caller may try again."""

    reason: str
    text: str
    retry_s: float


class Bucket:
    """A token bucket that may go into debt: a request passes while anything is left, and is charged afterwards.

    So no request is too large, and the next ones wait. The bucket gains ``rate`` units per second, and holds at most
    ``burst``. Its state is one time: ``full_s``, when it is full again.
    """

    __slots__ = ("full_s", "rate", "slack_s")

    def __init__(self, now_s: float) -> None:
        self.full_s, self.rate = now_s, 1.0

    def set(self, rate: float, burst: float, now_s: float) -> None:
        """Set another rate and burst. The used units stay used."""
        used = max(0.0, self.full_s - now_s) * self.rate
        self.rate, self.slack_s, self.full_s = rate, burst / rate - _ROUNDING_S, now_s + used / rate

    def take(self, units: float, now_s: float) -> None:
        self.full_s = max(self.full_s, now_s) + units / self.rate


class Account:
    """The limits of one principal, for one model or for all together, and their use.

    The bucket of requests never goes into debt. Its fields are in the account itself, because every request needs them.
    Without a limit, ``step_s`` is 0 and ``slack_s`` infinite.
    """

    __slots__ = ("full_s", "has_debts", "in_flight", "input_bytes", "max_in_flight", "slack_s", "step_s", "tokens")

    def __init__(self, limits: QuotaLimits, now_s: float) -> None:
        #: The requests in flight of the tenant. A `Use` counts its own.
        self.in_flight = 0
        self.full_s, self.step_s = now_s, 0.0
        self.input_bytes: Bucket | None = None
        self.tokens: Bucket | None = None
        self.set(limits, now_s)

    def set(self, limits: QuotaLimits, now_s: float) -> None:
        """Set other limits. The used units stay used."""
        self.max_in_flight = maxsize if limits.in_flight is None else limits.in_flight
        rates = {name: (rate, burst) for name, rate, burst in limits.rates()}
        used = max(0.0, self.full_s - now_s) / self.step_s if self.step_s else 0.0
        rate, burst = rates.get("requests_per_second", (inf, 1))
        self.step_s = 1 / rate
        self.slack_s = (burst - 1) / rate + _ROUNDING_S if self.step_s else inf
        self.full_s = now_s + used * self.step_s
        self.input_bytes = _bucket(self.input_bytes, rates.get("input_bytes_per_second"), now_s)
        self.tokens = _bucket(self.tokens, rates.get("output_tokens_per_minute"), now_s)
        self.has_debts = self.input_bytes is not None or self.tokens is not None

    def is_used_up(self, in_flight: int, now_s: float) -> bool:
        """True if a request is refused now."""
        return (
            in_flight >= self.max_in_flight
            or self.full_s > now_s + self.slack_s
            or (self.has_debts and self.is_in_debt(now_s))
        )

    def is_in_debt(self, now_s: float) -> bool:
        """True if the bucket of bytes or of tokens is in debt."""
        bucket = self.input_bytes
        if bucket is not None and bucket.full_s > now_s + bucket.slack_s:
            return True
        bucket = self.tokens
        return bucket is not None and bucket.full_s > now_s + bucket.slack_s

    def refusal(self, who: str, in_flight: int, now_s: float) -> QuotaRefusal:
        """Return the reason to refuse a request now."""
        if in_flight >= self.max_in_flight:
            return QuotaRefusal(
                "in_flight", f"{who} has {self.max_in_flight} inferences in flight, which is the limit", RETRY_S
            )
        if self.full_s > now_s + self.slack_s:
            text = f"{who} may ask {1 / self.step_s:g} inferences per second"
            return QuotaRefusal("rate", text, self.full_s - self.slack_s - now_s)
        bucket = self.input_bytes
        if bucket is not None and bucket.full_s > now_s + bucket.slack_s:
            text = f"{who} may send {bucket.rate:g} bytes per second"
            return QuotaRefusal("bytes", text, bucket.full_s - bucket.slack_s - now_s)
        assert self.tokens is not None
        text = f"{who} may have {self.tokens.rate * 60:g} output tokens per minute"
        return QuotaRefusal("tokens", text, self.tokens.full_s - self.tokens.slack_s - now_s)

    def take(self, size_bytes: int, now_s: float) -> None:
        """Charge one request. ``in_flight`` is not changed."""
        self.full_s = (self.full_s if self.full_s > now_s else now_s) + self.step_s
        if self.input_bytes is not None:
            self.input_bytes.take(size_bytes, now_s)

    def is_unused(self, now_s: float) -> bool:
        """True if nothing is in flight and every bucket is full."""
        buckets = (self, self.input_bytes, self.tokens)
        return not self.in_flight and all(bucket is None or bucket.full_s <= now_s for bucket in buckets)


class Tenant:
    """A principal, or an address without one. ``uses`` is the number of its `Use` objects."""

    __slots__ = ("account", "counters", "key", "next_refusal_s", "quota", "uses", "who")

    def __init__(self, key: TenantKey, book: QuotaBook, counters: Counters, now_s: float) -> None:
        self.key, self.counters, self.uses = key, counters, 0
        self.who = f"the principal '{one_line(key)}'" if isinstance(key, str) else f"the address '{key[0]}'"
        #: The earliest time of the next refusal at the rate that is answered at once.
        self.next_refusal_s = 0.0
        self.quota = self._quota(book)
        self.account = Account(self.quota.limits, now_s)

    def update(self, book: QuotaBook, now_s: float) -> None:
        """Use the quotas of another file."""
        self.quota = self._quota(book)
        self.account.set(self.quota.limits, now_s)

    def _quota(self, book: QuotaBook) -> Quota:
        return book.of_principal(self.key) if isinstance(self.key, str) else book.anonymous


def _bucket(before: Bucket | None, wanted: tuple[float, float] | None, now_s: float) -> Bucket | None:
    if wanted is None:
        return None
    bucket = Bucket(now_s) if before is None else before
    bucket.set(*wanted, now_s)
    return bucket
