from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.ticket import Ticket
from headrace.schedulers.in_flight import RequestQueue
from tests.core.conftest import make_ticket


def ticket(name: str = "") -> Ticket:
    return make_ticket(id=name)


def names(queue: RequestQueue) -> list[str]:
    return [waiting.request.id for waiting in queue.head(100)]


def test_head_leaves_the_requests_in_the_queue() -> None:
    queue = RequestQueue()
    queue.add(ticket("a"))
    assert names(queue) == names(queue) == ["a"]


def test_a_request_can_be_removed_only_once() -> None:
    queue, one = RequestQueue(), ticket()
    queue.add(one)
    assert queue.remove(one)
    assert not queue.remove(one)


def test_lower_levels_go_first_and_each_level_in_order_of_arrival() -> None:
    queue = RequestQueue()
    for name, level in (("a", 2), ("b", 1), ("c", 2), ("d", 1)):
        queue.add(ticket(name), level)
    assert names(queue) == ["b", "d", "a", "c"]


def test_a_postponed_request_is_last_in_its_level_and_before_the_next_level() -> None:
    queue = RequestQueue()
    late = ticket("late")
    queue.add(late, 1)
    queue.add(ticket("b"), 1)
    queue.add(ticket("c"), 2)
    assert queue.postpone(late, 1)
    assert names(queue) == ["b", "late", "c"]


def test_a_request_that_has_left_cannot_be_postponed() -> None:
    queue, one = RequestQueue(), ticket()
    queue.add(one)
    queue.remove(one)
    assert not queue.postpone(one, 1)
    assert len(queue) == 0


def test_empty_levels_cost_nothing() -> None:
    """Callers choose among 2^64 - 1 levels."""
    queue = RequestQueue()
    waiting = ticket("waiting")
    queue.add(waiting, 2**64 - 1)
    for level in range(1, 10_000):
        passing = ticket()
        queue.add(passing, level)
        assert queue.remove(passing)
    assert len(queue.lanes) <= 6
    assert queue.postpone(waiting, 2**64 - 1)
    assert (names(queue), queue.size(2**64 - 1), queue.size(5)) == (["waiting"], 1, 0)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=30), st.integers(1, 10))
def test_the_head_is_a_prefix_of_the_levels_in_order(arrivals: list[tuple[int, bool]], count: int) -> None:
    queue = RequestQueue()
    lanes: dict[tuple[int, bool], list[str]] = {(level, late): [] for level in (1, 2, 3) for late in (False, True)}
    for index, (level, late) in enumerate(arrivals):
        one = ticket(str(index))
        queue.add(one, level)
        if late:
            queue.postpone(one, level)
        lanes[level, late].append(one.request.id)
    expected = [name for key in sorted(lanes) for name in lanes[key]]
    assert [waiting.request.id for waiting in queue.head(count)] == expected[:count]
