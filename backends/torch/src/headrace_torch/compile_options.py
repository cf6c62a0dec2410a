"""The options of ``torch.compile`` in a config: the JSON of ``TORCH_COMPILE_OPTIONAL_PARAMETERS``.

Source: docs/spec/behaviours.md section 10.3, and the signature of ``torch.compile``. Read without PyTorch, so that a
config can be checked without loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace import ConfigError, one_line

KEY = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
#: The arguments of ``torch.compile`` but for the model: the types of each in JSON, and how an error names them.
_KNOWN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "fullgraph": ((bool,), "true or false"),
    "dynamic": ((bool, type(None)), "true, false or null"),
    "backend": ((str,), "text"),
    "mode": ((str, type(None)), "text or null"),
    "options": ((dict, type(None)), "an object or null"),
    "disable": ((bool,), "true or false"),
}


def parse_options(text: str, trust: bool) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile`` in ``text``; None if it is empty, which compiles nothing.

    ``options`` of PyTorch's compiler name commands, libraries and files, by text or lists; such, and ``trace``, which
    writes files, need ``trust``. Raises `ConfigError` naming the key, the value and the rule."""
    if not text.strip():
        return None
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"is no JSON: {error}: '{one_line(text)[:200]}'") from None
    if not isinstance(options, dict):
        raise _wrong(f"is '{one_line(text)[:200]}', expected a JSON object with {', '.join(_KNOWN)}")
    for key, value in options.items():
        if key == "model":
            raise _wrong("has 'model': 'model' is not an optional parameter for 'torch.compile'")
        if key not in _KNOWN:
            raise _wrong(f"has '{one_line(key)[:100]}', which torch.compile does not take; known: {', '.join(_KNOWN)}")
        types, expected = _KNOWN[key]
        if not isinstance(value, types):
            raise _wrong(f"has '{key}': {json.dumps(value)[:100]}, expected {expected}")
    if options.get("mode") is not None and options.get("options") is not None:
        raise _wrong("has 'mode' and 'options', of which torch.compile takes one")
    for key, value in (options.get("options") or {}).items():
        if not trust and (key.startswith("trace") or not isinstance(value, (bool, int, float, type(None)))):
            raise _wrong(
                f"has the option '{one_line(key)[:100]}', which may name files or commands: that needs the model's "
                "parameter 'trust' to be 'true'"
            )
    return options


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"parameter '{KEY}' {problem}", field=f"parameters[{KEY!r}]")
