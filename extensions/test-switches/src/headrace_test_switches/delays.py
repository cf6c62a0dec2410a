"""The delays that the environment sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace import ConfigError

#: The longest delay, in the unit of its variable.
LONGEST = 3_600_000
_GRPC = "TRITONSERVER_DELAY_GRPC_"
#: The variables of each delay, and how many of their unit are a second.
_VARIABLES = {
    "other_response_s": (("TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC",), 1),
    "request_s": ((f"{_GRPC}PROCESS_ENTRY", f"{_GRPC}PROCESS"), 1000),
    "response_s": ((f"{_GRPC}RESPONSE",), 1000),
    "end_s": ((f"{_GRPC}COMPLETE",), 1000),
    "cancel_s": ((f"{_GRPC}NOTIFICATION", f"{_GRPC}ENQUEUE"), 1000),
}


@dataclass(frozen=True)
class Delays:
    """All delays in seconds; 0 for none.

    ``other_response_s`` delays responses of operations other than inference. The others delay requests, responses, ends
    of streams and cancellations of inferences.
    """

    other_response_s: float = 0
    request_s: float = 0
    response_s: float = 0
    end_s: float = 0
    cancel_s: float = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Delays:
        """Return the delays of ``environ``. Raises `ConfigError` for a value that is not from 0 to 3,600,000."""
        return cls(
            **{
                field: sum(_read(environ, name) for name in names) / per_second
                for field, (names, per_second) in _VARIABLES.items()
            }
        )


def variables_set(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that delay something, with their values."""
    names = [name for names, _ in _VARIABLES.values() for name in names]
    return {name: environ[name] for name in names if _read(environ, name)}


def _read(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip() or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= LONGEST):
        raise ConfigError(f"the environment variable {name} is {text[:40]!r}, not a whole number from 0 to {LONGEST}")
    return int(text)
