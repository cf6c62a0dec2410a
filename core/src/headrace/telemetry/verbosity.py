"""The levels of ``--log-verbose``, as levels of `logging`. What stands at which is Triton's choice."""

from __future__ import annotations

import logging
from typing import Final

#: Shown from ``--log-verbose=1`` on: requests, completed configs, warm-up.
VERBOSE: Final = logging.DEBUG
#: From 2 on: the steps of loads and unloads.
VERBOSE_2: Final = VERBOSE - 1


def threshold(level: int) -> int:
    """The lowest level of `logging` that ``--log-verbose=level`` shows."""
    return max(VERBOSE + 1 - level, 1) if level > 0 else logging.INFO
