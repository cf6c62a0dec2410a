"""How a process ended, in the words of a message about it."""

from __future__ import annotations

import signal


def ending(code: int) -> str:
    """What a process with this exit code, negative for a signal, did: to complete "the process ..."."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
