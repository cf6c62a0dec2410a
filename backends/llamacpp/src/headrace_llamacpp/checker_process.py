"""A process that compiles grammars with limits of memory and time, so that a bad grammar harms no model.

It is ``python -m headrace_llamacpp.compile_grammars``. It starts with the first grammar, takes about 1 ms for each, and
exits when its pipe is closed. If it exits or takes too long, the grammar is refused, and the next one starts it again.
"""

from __future__ import annotations

from typing import Final

from headrace import BackendError
from headrace_llm import BoundedProcess

#: The longest time to compile a grammar, in seconds, and the most memory for it, in bytes.
LIMIT_S = 2.0
LIMIT_BYTES: Final = 512 << 20


class GrammarChecker:
    """Sends grammars to the process. Any thread; one grammar at a time."""

    def __init__(self) -> None:
        self._process = BoundedProcess("headrace_llamacpp.compile_grammars", LIMIT_BYTES)

    def why_bad(self, grammar: str) -> str:
        """Return why ``grammar`` cannot be compiled; empty if it can. Blocks, for at most `LIMIT_S` and a start."""
        try:
            answer = self._process.ask(grammar.encode("utf-8", "replace"), LIMIT_S)
        except BackendError as error:
            raise BackendError(
                "the process that checks grammars cannot start: can Python import llguidance?"
            ) from error
        if answer is None:
            return f"it takes more than {LIMIT_S:g} s or {LIMIT_BYTES >> 20} MiB to compile"
        return answer.decode()

    def close(self) -> None:
        self._process.close()
