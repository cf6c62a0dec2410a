"""What the instances of one version use together, such as one copy of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Shared(Generic[K, T]):
    """At most one engine, session or module for each key, made by the first instance that asks for it.

    A backend returns one from `Backend.share`, and has it as ``model.shared`` when it loads an instance. A key says
    what instances must have in common to use the same: the device, as a rule. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: What there is, by its key. For whoever must release it in a way of its own.
        self.made: dict[K, T] = {}

    def get(self, key: K, make: Callable[[], T]) -> T:
        """What is shared under ``key``; ``make`` makes it. Others wait meanwhile, and try again if it raises."""
        with self._lock:
            if key not in self.made:
                self.made[key] = make()
            return self.made[key]

    def close(self) -> None:
        """Forget everything; what an instance still holds lives as long as that."""
        self.made.clear()
