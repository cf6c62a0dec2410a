"""Objects that the instances of one version share, such as one copy of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Shared(Generic[K, T]):
    """At most one engine, session or module per key, created by the first instance that needs it.

    A backend returns one from `Backend.share`, and gets it as ``model.shared`` when it loads an instance. Instances
    with the same key share: usually the device. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The shared objects by key, for a backend that must release them in its own way.
        self.made: dict[K, T] = {}

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the object of ``key``, created by ``make``. Other threads wait, and try again if ``make`` raises."""
        with self._lock:
            if key not in self.made:
                self.made[key] = make()
            return self.made[key]

    def close(self) -> None:
        """Drop all objects. An object that an instance still holds lives as long as the instance."""
        self.made.clear()
