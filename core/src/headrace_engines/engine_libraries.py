"""Reads the files of an engine before it is imported, so that a slow disk delays only the model that loads."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headrace import in_memory


def read_libraries(package: str, *folders: str) -> None:
    """Read the libraries in ``folders`` of ``package`` into memory, before it is imported. "" is the package itself.

    The dynamic loader holds the interpreter's lock while it reads hundreds of megabytes page by page. On a fresh
    machine, the server would answer no request for a minute. Reading the files first releases the lock. Files that are
    in memory, imported already, or missing are skipped.
    """
    if package in sys.modules or (spec := find_spec(package)) is None:
        return
    for place in spec.submodule_search_locations or ():
        for folder in folders:
            for path in Path(place, folder).glob("*.so*"):
                with suppress(OSError), in_memory(path):  # the import reports the error
                    pass
