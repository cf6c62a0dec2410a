"""A directory of this machine with files of a model, which is released by its last user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class LocalDirectory:
    """The directory ``path``, until `release`. The last user's call deletes what is private. Also a context manager.

    ``name`` is the model's name, for a private directory. Any thread; `release` may block.
    """

    def __init__(self, path: Path, release: Callable[[], None], *, name: str = "") -> None:
        self.path = path
        self._name = name
        self._uses = _Uses(release)
        self._is_released = False

    def share(self) -> LocalDirectory:
        """Return the same directory for another user, who must release it, too."""
        other = LocalDirectory(self.path, self._uses.end, name=self._name)
        self._uses.begin()
        return other

    def release(self) -> None:
        """End the use. A second call does nothing."""
        if not self._is_released:
            self._is_released = True
            self._uses.end()

    def hide(self, text: str) -> str:
        """Return ``text`` for clients: a private directory is replaced by the model's name."""
        return text.replace(str(self.path), self._name) if self._name else text

    def __enter__(self) -> LocalDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Uses:
    """Calls ``release`` at the end of the last use."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release, self._count, self._lock = release, 1, threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self._release()
