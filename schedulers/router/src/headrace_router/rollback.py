"""The rule by which a target that does worse than the baseline loses its requests."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_router.windows import WindowTotal


@dataclass(frozen=True, slots=True)
class RollbackRule:
    """A target is rolled back if, in the last ``window_s``, one of these holds.

    - Its error rate is that of the baseline and more than ``max_error_rate`` above it, both from 0 to 1.
    - The time that 99 % of its requests do not exceed is more than ``max_p99_ratio`` times that of the baseline.

    None turns one off. Both count from ``min_requests`` requests to the target on; the second also needs as many to the
    baseline.
    """

    window_s: float = 60.0
    min_requests: int = 100
    max_error_rate: float | None = None
    max_p99_ratio: float | None = None

    @property
    def window_ns(self) -> int:
        return int(self.window_s * 1e9)

    @property
    def is_on(self) -> bool:
        return self.max_error_rate is not None or self.max_p99_ratio is not None

    def why(self, target: WindowTotal, baseline: WindowTotal) -> str:
        """Return why the target is rolled back, in words; empty if it is not."""
        if target.requests < self.min_requests:
            return ""
        if self.max_error_rate is not None and target.error_rate > baseline.error_rate + self.max_error_rate:
            return (
                f"{target.error_rate:.1%} of its {target.requests} requests failed in {self.window_s:g} s, and "
                f"{baseline.error_rate:.1%} of the {baseline.requests} of the baseline; the limit is "
                f"{self.max_error_rate:.1%} more"
            )
        if self.max_p99_ratio is None or baseline.requests < self.min_requests:
            return ""
        own_ns, baseline_ns = target.percentile_ns(0.99), baseline.percentile_ns(0.99)
        if own_ns > self.max_p99_ratio * baseline_ns:
            return (
                f"the p99 of its {target.requests} requests in {self.window_s:g} s is {own_ns / 1e6:.3g} ms, and that "
                f"of the baseline {baseline_ns / 1e6:.3g} ms; the limit is {self.max_p99_ratio:g} times as much"
            )
        return ""
