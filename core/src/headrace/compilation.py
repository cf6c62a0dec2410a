"""Which modules of this installation are compiled, by what, and whether from the source that stands beside them.

A compiled wheel has both: the interpreter takes the extension module and never looks at its source, so that a change
there would do nothing, and nobody would know why. `refuse_stale` says so before anything runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

FOLDER = Path(__file__).parent
#: What ``core/hatch_build.py`` writes into a compiled wheel: ``compiler``, in words, and ``sources``, the SHA-256 of
#: each compiled module's source by its path.
RECORD = "compiled.json"
#: As many modules are named in a refusal.
NAMED = 5


def describe(folder: Path = FOLDER) -> str:
    """What runs here, in words: "pure Python", or how many modules are compiled and by what."""
    compiled = list(compiled_modules(folder))
    if not compiled:
        return "pure Python"
    return f"compiled: {len(compiled)} modules, {_read_record(folder).get('compiler', 'by whom is not known')}"


def stale_modules(folder: Path = FOLDER) -> list[str]:
    """The compiled modules whose source is another than was compiled, by the path of the source. Reads them all."""
    compiled_from: Mapping[str, str] = _read_record(folder).get("sources", {})
    found = []
    for module in compiled_modules(folder):
        source = module.with_name(module.name.partition(".")[0] + ".py")
        name = str(source.relative_to(folder.parent))
        # Without its source a module is as old as it wants to be.
        if source.exists() and compiled_from.get(name) != hashlib.sha256(source.read_bytes()).hexdigest():
            found.append(name)
    return sorted(found)


def compiled_modules(folder: Path = FOLDER) -> Iterator[Path]:
    """The extension modules below ``folder`` that this interpreter takes in place of their source."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.partition(".")[2] and f".{name.partition('.')[2]}" in EXTENSION_SUFFIXES:
                yield Path(place, name)


def complaint(folder: Path = FOLDER) -> str:
    """What is wrong where compiled code would run in place of source that has changed; else empty."""
    stale = stale_modules(folder)
    more = f" and {len(stale) - NAMED} more" if len(stale) > NAMED else ""
    return (
        f"{', '.join(stale[:NAMED])}{more} in {folder.parent}: changed since compiled, and the old code would run; "
        "install headrace again, or delete the .so file beside each to run what is written there"
        if stale
        else ""
    )


@cache
def refuse_stale() -> None:
    """Raises `ConfigError` with the `complaint` about this installation, if there is one. Looks once per process."""
    if text := complaint():
        raise ConfigError(text)


@cache
def compiled_file(module: str) -> str:
    """The source of a ``module`` that has been imported, as "kernel.py", if it is compiled; else empty.

    Such a module runs without frames, in which `logging` would find out who has called it.
    """
    runs = getattr(sys.modules.get(module), "__file__", None) or ""
    return f"{module.rpartition('.')[2]}.py" if runs.endswith(tuple(EXTENSION_SUFFIXES)) else ""


def _read_record(folder: Path) -> Mapping[str, Any]:
    """As written at the build; empty where nothing was compiled."""
    try:
        record: Mapping[str, Any] = json.loads(folder.joinpath(RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record
