"""Values of flags with names that suggest a secret. No error repeats them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECRET_FLAG = re.compile(r"key|secret|passw|token", re.IGNORECASE)


def without_value(error: object, flag: str, value: str) -> str:
    """Return the text of ``error``, with ``***`` for ``value`` if the name of ``flag`` suggests a secret."""
    return str(error).replace(value, "***") if value and _SECRET_FLAG.search(flag) else str(error)


def without_values(error: object, words: Sequence[str]) -> str:
    """Return the text of ``error`` as `without_value`, for all flags with their values in ``words``."""
    text = str(error)
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            text = without_value(text, name, value if equals else following)
    return text
