"""The environment variables for the import of an engine, which reads them once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: The variables that set how threads of OpenMP wait.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_importing = threading.Lock()


def wait_policy() -> Mapping[str, str]:
    """Return the variables that make threads of OpenMP sleep while they wait for each other.

    By default they spin for 300,000 turns, 13 ms on some CPUs, on cores that the event loop and other instances need. A
    transformer of 0.06 GFLOP with two threads on two busy cores took 364 ms with spinning, and 4 ms with sleeping.
    Empty if the operator has set one of the variables.
    """
    return {} if any(os.environ.get(name) for name in _WAITING) else {"OMP_WAIT_POLICY": "passive"}


@contextmanager
def import_environment(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set `wait_policy` and ``variables`` while an engine is imported, by one thread at a time.

    Variables that are already set keep their values. Afterwards the variables are removed, so that other engines and
    child processes do not get them. Must not be nested.
    """
    with _importing:
        settings = {**wait_policy(), **(variables or {})}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update({name: value for name, value in settings.items() if not before[name]})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
