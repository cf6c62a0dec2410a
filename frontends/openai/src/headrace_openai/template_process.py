"""A process that renders the template of a model within limits of memory and time.

`headrace_openai.bounded_templates` counts the loops and calls of a template. One expression of Python can take more
than all of these: ``x ~ x`` in a loop doubles a text, and a list that has itself twice prints as 2^n of them. So a
template runs where it can take neither the memory nor the lock of the server.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final
from weakref import finalize

import orjson

from headrace import BackendError, ConfigError, InvalidArgument
from headrace_openai.body_members import encoded

#: The longest that one rendering may take, in seconds, and the memory of the process, in bytes.
LIMIT_S = 3.0
LIMIT_BYTES = 512 << 20
_START_S: Final = 60.0


class TemplateProcess:
    """Renders ``source``, one rendering after the other. Any thread. Ends with its last reference.

    Raises `ConfigError` if the template is wrong; ``who`` begins its text.
    """

    def __init__(self, source: str, who: str) -> None:
        self._first = orjson.dumps([source, who], default=str) + b"\n"
        self._who = who
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: finalize[..., Any] | None = None
        if wrong := self._ready()[1]:
            self._end()
            raise ConfigError(wrong)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt. Blocks, for at most `LIMIT_S` and a start.

        Raises `InvalidArgument` if the template refuses ``values``, fails, or takes too much.
        """
        line = encoded(values, "messages") + b"\n"
        with self._lock:
            process, wrong = self._ready()
            answer = None if wrong else _ask(process, line, LIMIT_S)
            if answer is None:
                self._end()
                raise InvalidArgument(
                    f"{self._who} takes more than {LIMIT_S:g} s or {LIMIT_BYTES >> 20} MiB for these messages"
                )
        text, wrong = orjson.loads(answer)
        if wrong:
            raise InvalidArgument(wrong)
        return str(text)

    def _ready(self) -> tuple[subprocess.Popen[bytes], str]:
        """Return the process with the compiled template, and what is wrong with the template."""
        if self._process is not None:
            return self._process, ""
        command = [sys.executable, "-m", "headrace_openai.render_templates", str(LIMIT_BYTES)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip
        self._process, self._finalizer = process, finalize(self, _stop, process)
        if _ask(process, b"\n", _START_S) is None:
            self._end()
            raise BackendError(f"{self._who}: the process that renders it cannot start")
        answer = _ask(process, self._first, LIMIT_S)
        if answer is None:
            return process, f"{self._who} takes more than {LIMIT_S:g} s or {LIMIT_BYTES >> 20} MiB to compile"
        return process, str(orjson.loads(answer)[1])

    def _end(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes | None:
    """Return the line that ``process`` answers to ``line``; None if it dies or is late."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except OSError:
        return None
    end_s, parts = monotonic() + limit_s, list[bytes]()
    while not parts or not parts[-1].endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, end_s - monotonic()))[0]:
            return None
        parts.append(process.stdout.read1(1 << 20))  # type: ignore[attr-defined]  # it is buffered
        if not parts[-1]:
            return None
    return b"".join(parts)
