"""A process that renders the template of a model within limits of memory and time.

`headrace_openai.bounded_templates` counts the loops and calls of a template. One expression of Python can take more
than all of these: ``x ~ x`` in a loop doubles a text, and a list that has itself twice prints as 2^n of them. So a
template runs where it can take neither the memory nor the lock of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace import BackendError, ConfigError, InvalidArgument
from headrace_llm import BoundedProcess
from headrace_openai.body_members import encoded

#: The longest that one rendering may take, in seconds, and the memory of the process, in bytes.
LIMIT_S = 3.0
LIMIT_BYTES = 512 << 20


class TemplateProcess:
    """Renders ``source``, one rendering after the other. Any thread. Ends with its last reference.

    Raises `ConfigError` if the template is wrong; ``who`` begins its text.
    """

    def __init__(self, source: str, who: str) -> None:
        self._who, self._template = who, orjson.dumps([source, who], default=str)
        self._process = BoundedProcess("headrace_openai.render_templates", LIMIT_BYTES)
        answer = self._ask(b"")
        if answer is None:
            raise ConfigError(f"{self._too_much()} to compile")
        if wrong := orjson.loads(answer)[1]:
            self._process.close()
            raise ConfigError(wrong)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt. Blocks, for at most `LIMIT_S` and a start.

        Raises `InvalidArgument` if the template refuses ``values``, fails, or takes too much.
        """
        answer = self._ask(encoded(values, "messages"))
        if answer is None:
            raise InvalidArgument(f"{self._too_much()} for these messages")
        text, wrong = orjson.loads(answer)
        if wrong:
            raise InvalidArgument(wrong)
        return str(text)

    def _ask(self, values: bytes) -> bytes | None:
        try:
            return self._process.ask(self._template + b"\n" + values, LIMIT_S)  # JSON has no bare line end
        except BackendError as error:
            raise BackendError(f"{self._who}: the process that renders it cannot start") from error

    def _too_much(self) -> str:
        return f"{self._who} takes more than {LIMIT_S:g} s or {LIMIT_BYTES >> 20} MiB"
