"""The lines of the audit log, from the records of what happened.

As in the access log, no text of a caller can end a line, add a field, or write to a terminal, and texts are cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace_logging.access_lines import LONGEST, quoted, second, word
from headrace_logging.secret_texts import without_secrets

#: The maximum characters of the details of an operation, and of an error.
_LONGEST_DETAILS, _LONGEST_ERROR = 2048, 512
#: Names of details that are never written to the file.
_SECRET = ("secret", "password", "token", "authorization", "credential")


class Audited(NamedTuple):
    """One event at a monotonic time.

    ``event`` is ``operation`` (a control operation ended), ``refused`` (an interceptor refused an operation),
    ``left_out`` (lines that were not written), or ``server`` (an action of the server itself).
    """

    at_ns: int
    event: str
    transport: str
    operation: str
    status: str
    peer: str = ""
    principal: str = ""
    certificate: str = ""
    model: str = ""
    details: Mapping[str, Any] = {}
    error: str = ""

    def fields(self) -> dict[str, Any]:
        """Return what is known, by the names of the fields."""
        texts: tuple[str, ...] = self[1:9]
        known: dict[str, Any] = {
            name: text[:LONGEST] for name, text in zip(self._fields[1:9], texts, strict=True) if text
        }
        if self.details:
            known |= _bounded({name: value for name, value in self.details.items() if name not in self._fields})
        if self.error:
            known["error"] = without_secrets(self.error[:_LONGEST_ERROR])
        return known


class AuditText:
    """Lines of an event and fields ``name=value``. A field that is not known is left out."""

    def lines(self, records: Iterable[tuple[Any, ...]], since_epoch_ns: int) -> str:
        """Return a line for each of ``records``, which are `Audited`."""
        return "".join([self._line(Audited._make(each), since_epoch_ns) for each in records])

    @staticmethod
    def dropped_line(dropped: int) -> str:
        return f"# {dropped} records were dropped\n"

    @staticmethod
    def _line(record: Audited, since_epoch_ns: int) -> str:
        fields = record.fields()
        start = " ".join([word(fields.pop(name)) for name in ("event", "transport", "operation") if name in fields])
        rest = "".join([f" {word(name)}={_shown(value)}" for name, value in fields.items()])
        return f"{_time(record, since_epoch_ns)} {start}{rest}\n"


class AuditJson(AuditText):
    """Lines that are JSON objects, in ASCII. A member that is not known is left out."""

    @staticmethod
    def dropped_line(dropped: int) -> str:
        return f'{{"dropped":{dropped}}}\n'

    @staticmethod
    def _line(record: Audited, since_epoch_ns: int) -> str:
        members = "".join([f",{quoted(name)}:{_value(value)}" for name, value in record.fields().items()])
        return f'{{"time":"{_time(record, since_epoch_ns)}"{members}}}\n'


def _time(record: Audited, since_epoch_ns: int) -> str:
    whole, micros = divmod((record.at_ns + since_epoch_ns) // 1000, 1_000_000)
    return f"{second(whole)}.{micros:06d}Z"


def _shown(value: Any) -> str:
    return word(value) if isinstance(value, str) and len(value) <= LONGEST else _value(value)


def _value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _bounded(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``details`` without secrets, or the beginning of its JSON text if it is long."""
    plain = {name: "***" if any(part in name.lower() for part in _SECRET) else each for name, each in details.items()}
    text = without_secrets(_value(plain))
    if len(text) > _LONGEST_DETAILS:
        return {"details": text[:_LONGEST_DETAILS]}
    return dict(json.loads(text))
