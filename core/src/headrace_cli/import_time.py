"""Imports without garbage collection, which would scan all objects that they create."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in this context: imports make many objects that stay. Freeze them at its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
