"""Messages whose meta is JSON: the rare ones, of which speed is not asked."""

from __future__ import annotations

import json
from typing import Any

from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import Frame, Kind, frame


def json_frame(kind: Kind, value: object) -> bytes:
    """A message whose meta is JSON."""
    return frame(kind, 0, json.dumps(value).encode())


def read_json(message: Frame) -> dict[str, Any]:
    """The value of a `json_frame`."""
    try:
        found = json.loads(message.text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{message.kind.name}: {error}") from error
    if not isinstance(found, dict):
        raise WireError(f"{message.kind.name}: a {type(found).__name__}")
    return found
