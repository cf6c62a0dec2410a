"""Changes of an access file by commands: in one step, one at a time, and only to a valid content."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace_access.key_file import KeyFile, load_document


@contextmanager
def changed(path: Path) -> Iterator[dict[str, Any]]:
    """Return the document of ``path``, or an empty one. Write it at the end, in one step, if it is valid.

    A lock beside the file keeps two commands from losing the change of one.
    """
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        document = load_document(path) if path.exists() else {"principals": {}}
        yield document
        KeyFile.parse(document, path)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
