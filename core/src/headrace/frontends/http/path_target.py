"""What a path names."""

from __future__ import annotations

from typing import NamedTuple


class PathTarget(NamedTuple):
    """``name`` is a model or a shared-memory region, ``version`` its digits; empty means none."""

    name: str = ""
    version: str = ""
    repository: str = ""
