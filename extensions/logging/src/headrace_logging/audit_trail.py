"""The content of the audit log, and its limits in a flood.

::

    refusals, and operations that failed    --audit-log-refusals a second; none if the file has --audit-log-size
    operations that succeeded               100 a second; none if the file has twice that size
    actions of the server itself            all

Each second in which lines are left out has one line with their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from headrace import Caller, HeadraceError
from headrace_logging.audit_lines import Audited, AuditJson, AuditText
from headrace_logging.line_file import LineFile

#: The maximum number of lines of successful operations per second.
_OPERATIONS = 100
#: The burst, in seconds of lines.
_BURST_S = 10
_NS = 1_000_000_000


class LineAllowance:
    """A rate limit of lines, and the number of lines that were left out since the last report."""

    __slots__ = ("_at_ns", "_max_ns", "_ns_each", "left_out")

    def __init__(self, per_second: int) -> None:
        """If ``per_second`` is 0, no line is allowed."""
        self._ns_each = _NS // per_second if per_second else 1
        self._max_ns = _BURST_S * _NS if per_second else -1
        self._at_ns = 0
        self.left_out = 0

    def allows(self, now_ns: int) -> bool:
        """True if one more line may be written."""
        slot_ns = max(self._at_ns, now_ns)
        if slot_ns - now_ns > self._max_ns:
            return False
        self._at_ns = slot_ns + self._ns_each
        return True


class AuditTrail:
    """The audit log of one server. Event loop only, except `event`."""

    def __init__(self, path: str, is_json: bool, refusals: int, size: int) -> None:
        """Open the file. Raises `ConfigError` if it can not be opened."""
        lines = AuditJson() if is_json else AuditText()
        self.file = LineFile(path, lines, "audit log", "--audit-log-file")
        self._size = size
        self._refusals, self._operations = LineAllowance(refusals), LineAllowance(_OPERATIONS)
        self._is_reporting = False
        #: The lines that were left out.
        self.left_out = 0
        #: The models that operations load or unload now.
        self.busy: set[str] = set()

    def refused(self, caller: Caller, error: HeadraceError, details: Mapping[str, Any]) -> None:
        """Add the line of an operation that an interceptor has refused."""
        now_ns = monotonic_ns()
        if self.file.size < self._size and self._refusals.allows(now_ns):
            self._add("refused", caller, error, details, now_ns)
        else:
            self._drop(self._refusals)

    def ended(self, caller: Caller, error: HeadraceError | None, details: Mapping[str, Any]) -> None:
        """Add the line of a control operation that was allowed, and is over."""
        now_ns = monotonic_ns()
        allowance, times = (self._operations, 2) if error is None else (self._refusals, 1)
        if self.file.size < times * self._size and allowance.allows(now_ns):
            self._add("operation", caller, error, details, now_ns)
        else:
            self._drop(allowance)

    def event(self, what: str, model: str = "", **details: Any) -> None:
        """Add the line of an action of the server itself. Any thread."""
        self.file.add_now(Audited(monotonic_ns(), "server", "", what, "", model=model, details=details))

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self._report_left_out()
        self.file.close()

    def _add(
        self, event: str, caller: Caller, error: HeadraceError | None, details: Mapping[str, Any], now_ns: int
    ) -> None:
        self.file.add_now(
            Audited(
                now_ns,
                event,
                caller.transport,
                str(caller.operation),
                "ok" if error is None else error.code.value,
                caller.peer,
                caller.principal,
                str((caller.certificate or {}).get("serialNumber", "")),
                caller.model or str(details.get("model", "")),
                details,
                "" if error is None else error.message,
            )
        )

    def _drop(self, allowance: LineAllowance) -> None:
        allowance.left_out += 1
        self.left_out += 1
        if not self._is_reporting:
            self._is_reporting = True
            asyncio.get_running_loop().call_later(1.0, self._report_left_out)

    def _report_left_out(self) -> None:
        """Add the line with the number of lines that were left out."""
        self._is_reporting = False
        refusals, operations = self._refusals.left_out, self._operations.left_out
        if refusals or operations:
            self._refusals.left_out = self._operations.left_out = 0
            counts = {"refusals": refusals, "operations": operations}
            self.file.add_now(Audited(monotonic_ns(), "left_out", "", "", "", details=counts))
