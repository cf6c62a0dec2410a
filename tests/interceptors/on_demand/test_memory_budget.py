"""Which models make room for others: by arithmetic, without a server."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic

import pytest

from headrace_on_demand.memory_budget import MemoryBudget
from headrace_on_demand.model_state import ModelState


def state(name: str, used: int, *needed: str) -> ModelState:
    state = ModelState(name, lambda: None)
    state.used_ns, state.needed = used, needed
    return state


def residents(*states: ModelState) -> dict[str, ModelState]:
    return {each.name: each for each in states}


def budget(limit: int, **charges: int) -> MemoryBudget:
    memory = MemoryBudget({"host": limit})
    memory.charges = {name: {"host": size} for name, size in charges.items()}
    return memory


def names(victims: list[ModelState] | None) -> list[str] | None:
    return None if victims is None else [each.name for each in victims]


def any_model(each: ModelState) -> bool:
    return True


def test_the_least_recently_used_are_evicted_first_and_no_more_than_needed() -> None:
    memory = budget(100, a=40, b=30, c=30)
    known = residents(state("a", 2), state("b", 1), state("c", 3))
    assert names(memory.victims([{"host": 10}], known, (), (), any_model)) == ["b"]
    assert names(memory.victims([{"host": 35}], known, (), (), any_model)) == ["a"]  # b alone is not enough, a is
    assert names(memory.victims([{"host": 60}], known, (), (), any_model)) == ["b", "a"]
    assert names(memory.victims([{"host": 100}], known, (), (), any_model)) == ["b", "a", "c"]


def test_nothing_is_evicted_if_it_would_not_help() -> None:
    memory = budget(100, a=40, busy=60)
    known = residents(state("a", 1), state("busy", 2))
    assert memory.victims([{"host": 50}], known, (), (), lambda each: each.name != "busy") is None
    assert memory.victims([{"host": 50}], known, ["busy"], (), any_model) is None


def test_evictions_in_progress_count() -> None:
    memory = budget(100, a=40, eviction=60)
    assert names(memory.victims([{"host": 60}], residents(state("a", 1)), (), ["eviction"], any_model)) == []


@pytest.mark.parametrize(
    ("is_evictable", "expected"), [(any_model, ["ensemble", "step"]), (lambda each: each.name != "ensemble", None)]
)
def test_a_step_is_evicted_only_after_its_ensembles(
    is_evictable: Callable[[ModelState], bool], expected: list[str] | None
) -> None:
    memory = budget(100, ensemble=0, step=90)
    known = residents(state("step", 1), state("ensemble", 2, "step"))
    assert names(memory.victims([{"host": 50}], known, (), (), is_evictable)) == expected


def test_each_device_has_its_own_budget() -> None:
    memory = MemoryBudget({"host": 100, "gpu 0": 50})
    memory.charges = {"a": {"host": 10, "gpu 0": 50}, "b": {"host": 90}}
    known = residents(state("b", 1), state("a", 2))
    assert names(memory.victims([{"gpu 0": 10}], known, (), (), any_model)) == ["a"]
    assert memory.why_impossible({"c": {"gpu 0": 51}}) == (
        "it needs 51 bytes on gpu 0, and all models together may use 50 bytes (--on-demand-gpu-memory)"
    )
    assert memory.why_impossible({"c": {"host": 60}, "d": {"host": 60}}) == (
        "it needs 120 bytes on host (c: 60 bytes, d: 60 bytes), and all models together may use 100 bytes "
        "(--on-demand-memory)"
    )
    assert memory.why_impossible({"c": {"host": 100, "gpu 0": 50}}) == ""


def test_random_models_always_fit_after_their_victims() -> None:
    draw = random.Random(1)
    for _ in range(300):
        memory = MemoryBudget({"host": 100})
        known: dict[str, ModelState] = {}
        while memory.used("host") < 80:
            name = f"m{len(known)}"
            needed = draw.sample(sorted(known), min(len(known), draw.choice((0, 0, 1, 2))))
            known[name] = state(name, draw.randrange(1000), *needed)
            memory.charges[name] = {"host": draw.randrange(1, 20)}
        pinned = {name for name in known if draw.random() < 0.2}
        need = draw.randrange(1, 101)
        chosen = memory.victims([{"host": need}], known, (), (), lambda each: each.name not in pinned)  # noqa: B023
        if chosen is None:
            continue
        evicted = {each.name for each in chosen}
        assert not evicted & pinned
        assert memory.used("host") - sum(memory.charges[name]["host"] for name in evicted) + need <= 100
        for position, each in enumerate(chosen):  # its dependents are evicted before it
            above = {other.name for other in known.values() if each.name in other.needed}
            assert above <= {before.name for before in chosen[:position]}


def test_thousands_of_busy_models_block_the_event_loop_for_milliseconds() -> None:
    count = 5000
    memory = budget(count, **{f"m{number}": 1 for number in range(count)})
    known = residents(*(state(f"m{number}", number) for number in range(count)))
    began_s = monotonic()
    assert memory.victims([{"host": 1}], known, (), (), lambda each: False) is None
    assert len(memory.victims([{"host": count // 2}], known, (), (), any_model) or ()) == count // 2
    assert monotonic() - began_s < 1  # not quadratic, which takes 10 s
