"""The credentials of a cloud's client: the identity, and its source.

The first of these sources is used:

1. the entry of Triton's credential file (``TRITON_CLOUD_CREDENTIAL_PATH``) with the longest matching prefix of the URL,
2. environment variables,
3. the cloud's own chain: files of its tools, a workload's identity, the machine's identity,
4. none: anonymous requests, which read public buckets.

Source: docs/spec/behaviours.md section 5.8.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import ConfigError

#: Triton's variable for its credential file.
FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
#: The timeout in seconds of a connection to the metadata service of a cloud.
METADATA_S = 1.0
_METADATA_ADDRESS = ("169.254.169.254", 80)


@dataclass(frozen=True, slots=True)
class Credentials:
    """``config`` and ``provider`` go to obstore. ``source`` and ``region`` are for messages and name no secret."""

    source: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    provider: Callable[[], Any] | None = None
    region: str = ""


def entry_of_file(scheme: str, url: str) -> tuple[str, Any] | None:
    """Return the prefix and the entry for ``url`` in Triton's credential file; None if there is none.

    Blocks. Raises `ConfigError` if the file cannot be read.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return None
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE} names '{path}', which cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{FILE_VARIABLE} names '{path}', which is no JSON") from error
    entries = document.get(scheme, {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise ConfigError(f"{FILE_VARIABLE}: '{scheme}' is not an object with an entry for each prefix")
    fitting = [prefix for prefix in entries if url.startswith(prefix)]
    if not fitting:
        return None
    longest = max(fitting, key=len)
    return longest, entries[longest]


def texts_of_entry(scheme: str, prefix: str, entry: Any, known: tuple[str, ...]) -> dict[str, str]:
    """Return the fields of an entry that are not empty. Raises `ConfigError`, which names no value."""
    where = f"{FILE_VARIABLE}: {scheme}.'{prefix}'"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object with {', '.join(known)}")
    for name, value in entry.items():
        if name not in known:
            raise ConfigError(f"{where} has the unknown field '{name}'; it may have {', '.join(known)}")
        if not isinstance(value, str):
            raise ConfigError(f"{where}.{name} is not a string")
    return {name: value for name, value in entry.items() if value}


def entry_source(scheme: str, prefix: str) -> str:
    """Return how messages call an entry of the credential file."""
    return f"entry '{prefix}' of '{scheme}' in {FILE_VARIABLE}"


def has_metadata_service() -> bool:
    """True if this machine has a metadata service, which gives it an identity. Takes at most `METADATA_S`."""
    try:
        socket.create_connection(_METADATA_ADDRESS, METADATA_S).close()
    except OSError:
        return False
    return True
