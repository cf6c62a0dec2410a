"""What a path names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class PathTarget(NamedTuple):
    """``name`` is a model or a shared-memory region, ``version`` its digits; empty means none.

    ``values`` are those of all placeholders.
    """

    name: str = ""
    version: str = ""
    repository: str = ""
    values: Mapping[str, str] = MappingProxyType({})
