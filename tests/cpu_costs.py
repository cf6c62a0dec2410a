"""What each test costs: seconds of CPU, those of the processes that ended during it included.

``PYTHONPATH=. pytest -p tests.cpu_costs -n 2 tests/e2e`` prints the functions that cost most. A server that the tests
of a module or of the session share is counted where it ends: at the last of them.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest

_MOST = 40


def _cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = _cpu_s()
    return (yield)


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    now = _cpu_s()
    report.user_properties.append(("cpu_s", now - item.stash[_BEGAN]))
    item.stash[_BEGAN] = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    costs: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                function = report.nodeid.partition("[")[0]
                counts[function] += report.when == "call"
                for name, value in report.user_properties:
                    if name == "cpu_s" and isinstance(value, float):
                        costs[function] += value
    terminalreporter.section(f"CPU: {sum(costs.values()):.1f} s")
    for function, seconds in sorted(costs.items(), key=lambda pair: -pair[1])[:_MOST]:
        terminalreporter.line(f"{seconds:8.2f} s {counts[function]:5} tests  {function}")
