"""The choice by weights. The oracles are arithmetic: shares of counts, and keys that may move."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_router.splitting import Split

LABELS = ("a", "b", "c")


@pytest.mark.parametrize("weights", [(90, 10, 0), (1, 1, 1), (99.9, 0.1, 0), (0, 0, 5), (1e-6, 1_000_000, 3)])
def test_every_run_of_requests_is_split_by_the_weights(weights: tuple[float, ...]) -> None:
    split = Split(LABELS, weights)
    chosen = [split.next() for _ in range(100_000)]
    for begin, end in ((0, 100_000), (5_000, 6_000), (99_000, 100_000)):
        counts = Counter(chosen[begin:end])
        for index, weight in enumerate(weights):
            expected = weight / sum(weights) * (end - begin)
            assert abs(counts[index] - expected) < 8, (index, counts)
            assert weight or not counts[index]


@pytest.mark.parametrize("every", [2, 3, 5, 8])
def test_each_part_of_a_repeated_pattern_is_split(every: int) -> None:
    split = Split(("a", "b"), (1, 1))
    chosen = [split.next() for _ in range(10_000)]
    for first in range(every):
        part = chosen[first::every]
        assert abs(sum(part) - len(part) / 2) < 10, (every, first)


def test_a_change_of_weights_continues_the_split() -> None:
    one = Split(LABELS, (1, 1, 1))
    for _ in range(1000):
        one.next()
    other = Split(LABELS, (1, 1, 1), one.point)
    assert [one.next() for _ in range(50)] == [other.next() for _ in range(50)]


def test_keys_are_split_by_the_weights_and_stay() -> None:
    split, again = Split(LABELS, (70, 20, 10)), Split(LABELS, (7, 2, 1))
    keys = [f"user-{number}" for number in range(20_000)]
    chosen = [split.of_key(key) for key in keys]
    assert chosen == [again.of_key(key) for key in keys], "only the proportions count"
    counts = Counter(chosen)
    for index, share in enumerate((0.7, 0.2, 0.1)):
        assert abs(counts[index] / len(keys) - share) < 0.015, counts


def test_the_target_of_a_key_is_the_same_in_every_process() -> None:
    """A key must not move at a restart, nor with the next release: these choices are fixed."""
    split = Split(("digits:1", "digits:2"), (50, 50))
    chosen = "".join(str(split.of_key(key)) for key in ("ada", "bob", "cleo", "dan", "eve", "", "\udcff", "Zoë"))
    assert chosen == "01011100"


def test_a_changed_weight_moves_as_few_keys_as_it_can() -> None:
    keys = [f"user-{number}" for number in range(10_000)]
    before, after = Split(LABELS[:2], (90, 10)), Split(LABELS[:2], (80, 20))
    moved = [(before.of_key(key), after.of_key(key)) for key in keys if before.of_key(key) != after.of_key(key)]
    assert set(moved) == {(0, 1)}, "keys move to the target that got more, and never back"
    assert abs(len(moved) / len(keys) - 0.1) < 0.01


def test_with_three_targets_keys_move_only_to_the_one_that_got_more() -> None:
    keys = [f"user-{number}" for number in range(5_000)]
    before, after = Split(LABELS, (60, 30, 10)), Split(LABELS, (60, 30, 30))
    assert all(before.of_key(key) == after.of_key(key) or after.of_key(key) == 2 for key in keys)


def test_a_target_without_weight_gets_no_key() -> None:
    split = Split(LABELS, (0, 1, 0))
    assert {split.of_key(str(number)) for number in range(1000)} == {1}


def test_weights_near_zero_give_nothing_to_a_target_without_weight() -> None:
    split = Split(LABELS, (0, 1e-320, 0))  # a draw over such a weight is infinite
    assert {split.of_key(f"user-{number}") for number in range(50)} == {1}
    assert {split.next() for _ in range(50)} == {1}


def test_a_repeated_key_is_hashed_once_unless_it_is_long() -> None:
    split = Split(LABELS, (70, 20, 10))
    for key in ("ada", "ada", "x" * 128, "x" * 128, "y" * 129, "y" * 129):
        assert split.of_key(key) == Split(LABELS, (70, 20, 10)).of_key(key)
    cache = split._cached_hash.cache_info()
    assert (cache.hits, cache.currsize) == (2, 2)
    for number in range(6000):
        split.of_key(f"user-{number}")
    assert split._cached_hash.cache_info().currsize == 4096
