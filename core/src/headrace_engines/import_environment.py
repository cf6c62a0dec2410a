"""The environment in which an engine is imported: engines read settings from it once, when they are loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: The variables that tell OpenMP how its threads wait.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_importing = threading.Lock()


def wait_policy() -> Mapping[str, str]:
    """Return the variables that let the threads of OpenMP sleep while they wait for each other.

    They would spin for 300,000 turns, 13 ms on some CPUs, on cores that the event loop and other instances need: a
    transformer of 0.06 GFLOP with two threads on two busy cores then took 364 ms, and 4 ms if they sleep. Empty if the
    environment of this process says how they wait: the operator decides.
    """
    return {} if any(os.environ.get(name) for name in _WAITING) else {"OMP_WAIT_POLICY": "passive"}


@contextmanager
def import_environment(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set `wait_policy` and ``variables`` while an engine is imported, by one thread at a time.

    A variable that the environment has already keeps its value. Afterwards none is left for other engines and for child
    processes. Must not be nested.
    """
    with _importing:
        wanted = {**wait_policy(), **(variables or {})}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update({name: value for name, value in wanted.items() if not before[name]})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
