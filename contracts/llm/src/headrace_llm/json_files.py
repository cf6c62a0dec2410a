"""JSON files of a model, such as ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace import LoadError, open_regular


def read_json_file(path: Path, most_bytes: int) -> Any:
    """Return the JSON value in the regular file ``path``, of at most ``most_bytes`` bytes. Blocks. Any thread.

    Raises `LoadError` with the path and the reason: the file cannot be read, is too large, or is not JSON.
    """
    try:
        with open_regular(path) as file:
            text = file.read(most_bytes + 1)
    except OSError as error:
        raise LoadError(f"unable to read {path}: {error.strerror or error}") from error
    if len(text) > most_bytes:
        raise LoadError(f"{path} has more than {most_bytes} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not JSON: {error}") from None
