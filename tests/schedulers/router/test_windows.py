"""The requests of the last seconds. The oracle of percentiles is NumPy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from headrace_router.windows import SlidingWindow, buckets_of, end_of

S = 1_000_000_000


def test_buckets_are_in_order_and_at_most_a_sixteenth_wide() -> None:
    durations = sorted({1 << power for power in range(43)} | {Random(1).randrange(1 << 43) for _ in range(2000)})
    buckets = buckets_of(np.array(durations, np.int64))
    assert (np.diff(buckets) >= 0).all()
    for duration, bucket in zip(durations, buckets.tolist(), strict=True):
        assert duration <= end_of(bucket) <= duration * (1 + 1 / 15) + 1
    assert buckets_of(np.array([0, -5, 1 << 62], np.int64)).tolist() == [0, 0, 639]


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_percentiles_are_right_to_a_sixteenth(share: float) -> None:
    random, window = Random(2), SlidingWindow(60 * S)
    durations = [int(random.lognormvariate(15, 1)) for _ in range(5000)]
    for number, duration in enumerate(durations):
        window.add(number * S // 100, duration, False)
    expected = float(np.quantile(durations, share, method="inverted_cdf"))
    assert expected <= window.total(50 * S).percentile_ns(share) <= expected * 1.07


def test_values_older_than_the_window_do_not_count() -> None:
    window = SlidingWindow(12 * S)
    window.add(0, 5, True)
    window.add(6 * S, 5, False)
    assert (window.total(6 * S).requests, window.total(6 * S).error_rate) == (2, 0.5)
    assert (window.total(12 * S).requests, window.total(12 * S).error_rate) == (1, 0.0)
    window.add(40 * S, 5, False)
    assert window.total(40 * S).requests == 1
    assert window.total(90 * S).requests == window.total(90 * S).percentile_ns(0.99) == 0
    window.add(91 * S, 5, False)
    window.clear()
    assert window.total(91 * S).requests == 0
