"""Settings and parameters whose names say that their values are secrets. The log does not show them."""

from __future__ import annotations

import re

_SECRET = re.compile(r"secret|passw|credential|api_?key|private_?key|access_?key|token$|signature", re.IGNORECASE)


def shown(name: str, value: str) -> str:
    """Return ``value`` of the setting ``name`` for a log: ``***`` if it is a secret."""
    return "***" if value and _SECRET.search(name) else value
