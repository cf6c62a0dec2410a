"""Reads what an engine consists of before it is imported, so that a slow disk stops nobody but the model that loads."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headrace import in_memory


def read_libraries(package: str, *folders: str) -> None:
    """Have the libraries in ``folders`` of ``package``, which is about to be imported, in memory: "" is its own.

    The dynamic loader holds the interpreter's lock while the disk gives it one page after the other of hundreds of
    megabytes: on a fresh machine for a minute, in which the server would answer nobody, not even that it lives. Reading
    lets go of the lock. Nothing is read that is in memory already, that has been imported, or that is not there.
    """
    if package in sys.modules or (spec := find_spec(package)) is None:
        return
    for place in spec.submodule_search_locations or ():
        for folder in folders:
            for path in Path(place, folder).glob("*.so*"):
                with suppress(OSError), in_memory(path):  # to import it says what is wrong with it
                    pass
