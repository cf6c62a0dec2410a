"""Targets that are worse than the baseline. The clock is manual, so that every rate and p99 is exact."""

from __future__ import annotations

import logging

import pytest

from headrace import BackendError, Cancelled, InvalidArgument
from headrace_router.rollback import RollbackRule
from headrace_router.windows import SlidingWindow
from headrace_testing.simulator import run_scenario

from .conftest import router
from .simulator import Caller, RouterSimulator

MS = 1_000_000
S = 1000 * MS


def window(requests: int, errors: int = 0, ms: int = 1) -> SlidingWindow:
    made = SlidingWindow(60 * S)
    for number in range(requests):
        made.add(S, ms * MS, number < errors)
    return made


@pytest.mark.parametrize(
    ("target", "baseline", "is_back"),
    [
        (window(100, 11), window(900), True),
        (window(100, 10), window(900), False),
        (window(99, 99), window(900), False),
        (window(100, 50), window(900, 450), False),
        (window(100, 100), window(0), True),
        (window(100, 0, ms=21), window(900, 0, ms=10), True),
        (window(100, 0, ms=18), window(900, 0, ms=10), False),
        (window(100, 0, ms=100), window(99, 0, ms=10), False),
        (window(0), window(0), False),
    ],
)
def test_the_signature_rule_is_applied(target: SlidingWindow, baseline: SlidingWindow, is_back: bool) -> None:
    rule = RollbackRule(max_error_rate=0.1, max_p99_ratio=2)
    assert bool(rule.why(target.total(S), baseline.total(S))) == is_back
    assert not RollbackRule().why(target.total(S), baseline.total(S))


def targets(simulator: RouterSimulator, count: int = 20) -> set[str]:
    return {simulator.serve().target for _ in range(count)}


def test_a_failed_target_gets_no_requests_after_its_rollback(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 50, b = 50", max_error_rate=0.2, min_requests=20))
        callers: list[Caller] = []
        for _ in range(100):
            caller = simulator.send()
            is_failing = simulator.calls[0].request.model_name == "b"
            simulator.clock.advance(20 * MS)
            simulator.answer(BackendError("broken") if is_failing else None)
            callers.append(caller)
        failed = [caller for caller in callers if isinstance(caller.answers[0], BackendError)]
        assert 20 <= len(failed) <= 35, "targets are judged every 600 ms, in which it gets 15 requests"
        assert targets(simulator) == {"a by weights", "a by rollback"}
        assert simulator.router.decider.weights == [100, 0]
        simulator.clock.advance(10 * S)
        assert targets(simulator) == {"a by weights", "a by rollback"}, "time does not heal"
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "router 'r' rolls back target 'b': 100.0% of its " in warnings[0].getMessage()
        measured = simulator.router.measure()
        assert measured["headrace_router_rollbacks_total"] == {"a": 0, "b": 1}
        assert measured["headrace_router_weight"] == {"a": 100, "b": 0}
        simulator.router.apply({"weights": [1, 1], "shadow": None, "rolled_back": {}})
        assert targets(simulator) == {"a by weights", "b by weights"}, "new weights take it back"
        simulator.clock.advance(S)
        assert targets(simulator) == {"a by weights", "b by weights"}, "and earlier errors do not count any more"

    run_scenario(scenario)


def test_a_slow_target_is_rolled_back_against_the_baseline() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 50, b = 50", max_p99_ratio=3, min_requests=20))
        for _ in range(100):
            simulator.send()
            simulator.clock.advance(50 * MS if simulator.calls[0].request.model_name == "b" else 10 * MS)
            simulator.answer()
        assert list(simulator.router.decider.rolled_back) == ["b"]
        assert "the p99 of its 2" in simulator.router.decider.rolled_back["b"]["reason"]

    run_scenario(scenario)


def test_a_hanging_target_is_detected_by_its_cancelled_callers() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 50, b = 50", max_p99_ratio=3, min_requests=20))
        for _ in range(100):
            caller = simulator.send()
            if simulator.calls[0].request.model_name == "b":
                simulator.clock.advance(1000 * MS)
                caller.ticket.cancel()
                simulator.calls.clear()
            else:
                simulator.clock.advance(10 * MS)
                simulator.answer()
        assert list(simulator.router.decider.rolled_back) == ["b"]

    run_scenario(scenario)


def test_nothing_is_rolled_back_if_the_baseline_is_as_bad() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 50, b = 50", max_error_rate=0.2, min_requests=20))
        for _ in range(200):
            simulator.serve(InvalidArgument("no"), 20 * MS)
        assert simulator.router.decider.rolled_back == {}

    run_scenario(scenario)


def test_a_cancelled_request_is_no_error_of_the_target() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 1, b = 9", max_error_rate=0, min_requests=20))
        for _ in range(100):
            simulator.serve(Cancelled("gone"), 20 * MS)
        assert simulator.router.decider.rolled_back == {}
        assert simulator.router.measure()["headrace_router_errors_total"] == {"a": 0, "b": 0}

    run_scenario(scenario)


def test_rules_and_keys_of_a_rolled_back_target_go_to_the_baseline() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(
            router(
                "a = 1, b = 1, c = 1",
                rules="parameter:beta -> b",
                sticky="parameter:user",
                max_error_rate=0.1,
                min_requests=5,
            )
        )
        users = {user: simulator.serve(parameters={"user": user}).target for user in range(60)}
        for _ in range(80):
            simulator.serve(BackendError("broken"), 20 * MS, parameters={"beta": 1})
        assert list(simulator.router.decider.rolled_back) == ["b"]
        assert simulator.serve(parameters={"beta": 1}).target == "a by rollback"
        for user, before in users.items():
            after = simulator.serve(parameters={"user": user}).target
            assert after == ("a by rollback" if before == "b by sticky" else before)

    run_scenario(scenario)


def test_the_baseline_is_never_rolled_back() -> None:
    async def scenario() -> None:
        simulator = RouterSimulator(router("a = 9, b = 1", max_error_rate=0.1, min_requests=5))
        for _ in range(100):
            simulator.send()
            is_baseline = simulator.calls[0].request.model_name == "a"
            simulator.clock.advance(20 * MS)
            simulator.answer(BackendError("broken") if is_baseline else None)
        assert simulator.router.decider.rolled_back == {}

    run_scenario(scenario)
