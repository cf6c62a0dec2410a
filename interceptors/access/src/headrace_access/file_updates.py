"""Atomic changes of an access file by commands."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace_access.key_file import KeyFile, load_document


@contextmanager
def changed(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the document of ``path``, or an empty one. Replace the file at the end, if the document is valid.

    Only its owner may read a new file. An existing file keeps its mode, and its owner and group if that is permitted. A
    lock beside the file serializes commands.
    """
    path = path.resolve()  # keeps a symbolic link
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        former = path.stat() if path.exists() else None
        document = {"principals": {}} if former is None else load_document(path)
        yield document
        KeyFile.parse(document, path)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            if former is not None:
                with suppress(PermissionError):
                    os.fchown(file.fileno(), former.st_uid, former.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
