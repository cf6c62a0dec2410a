"""Regular expressions that an operator writes: RE2's syntax, as Triton's, in time linear to what is searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.distributions import need


def header_pattern(pattern: str) -> Callable[[str], Any]:
    """A search for ``pattern`` in the name of a header, whose case does not count unless it says ``(?-i)``.

    Raises `ValueError`, naming the pattern, if it is malformed. The library is imported here, for those only who
    have a pattern; `ConfigError` says how to install it.
    """
    need("re2", "A pattern of headers to forward")
    import re2

    options = re2.Options()
    options.log_errors = False  # on stderr, which is the log's
    options.case_sensitive = False
    try:
        search: Callable[[str], Any] = re2.compile(pattern, options).search
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"invalid regular expression '{pattern}' (RE2): {text}") from None
    return search
