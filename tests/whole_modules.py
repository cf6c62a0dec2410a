"""How pytest's processes share the tests: module by module, because the tests of a module share what is dear to make.

`WorkStealingScheduling` of xdist cuts its list of tests at any test. Each cut within a module makes the servers of that
module a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdist.scheduler import WorkStealingScheduling

#: What one process runs to the end: a module whose server takes 14 s of CPU. A folder ends with a slash.
UNDIVIDED = ("tests/e2e/test_engines.py",)
#: A process of xdist keeps the test that it runs and the next.
_KEPT = 2


def group(test: str) -> str:
    """Return the module of ``test``, or what of `UNDIVIDED` has it."""
    module = test.partition("::")[0]
    return next((whole for whole in UNDIVIDED if module.startswith(whole)), module)


def cut(tests: Sequence[str], wanted: int, first: int = 1) -> int | None:
    """Return the index from ``first`` on, nearest to ``wanted``, at which another group begins, or None."""
    begins = (index for index in range(first, len(tests)) if group(tests[index]) != group(tests[index - 1]))
    return min(begins, key=lambda index: abs(index - wanted), default=None)


class WholeModules(WorkStealingScheduling):  # type: ignore[misc]
    """Deals and steals whole modules while there are any to steal. After that, a process steals half of a module that
    another one has begun, but never of `UNDIVIDED`."""

    steal_requested_from_node: Any

    def check_schedule(self) -> None:
        idle = self._idle()
        for number, node in enumerate(idle):
            if self.pending:
                self._send_tests(node, len(self.pending) // (len(idle) - number))
        idle = self._idle()
        if not idle or self.steal_requested_from_node is not None:
            return
        working = sorted(self._up(), key=lambda node: -len(self.node2pending[node]))
        for find in (self._cut_between, self._cut_within):
            for node in working:
                pending = self.node2pending[node]
                at = find(self._names(pending))
                if at is not None:
                    node.send_steal(pending[at:])
                    self.steal_requested_from_node = node
                    return
        for node in idle:
            node.shutdown()

    def _send_tests(self, node: Any, num: int) -> None:
        names = self._names(self.pending)
        super()._send_tests(node, num if num == len(names) else cut(names, num) or len(names))

    def _cut_between(self, names: Sequence[str]) -> int | None:
        return cut(names, len(names) // 2, _KEPT)

    def _cut_within(self, names: Sequence[str]) -> int | None:
        if len(names) <= _KEPT or group(names[-1]) in UNDIVIDED:
            return None
        return max(_KEPT, len(names) - len(names) // 2)

    def _names(self, indices: Sequence[int]) -> list[str]:
        assert self.collection is not None
        return [self.collection[index] for index in indices]

    def _up(self) -> list[Any]:
        return [node for node in self.node2pending if not node.shutting_down]

    def _idle(self) -> list[Any]:
        return [node for node in self._up() if len(self.node2pending[node]) < _KEPT]
