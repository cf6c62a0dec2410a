"""Nothing of a model lies outside the model repository, unless ``--allow-external-links`` says that it may.

Whoever may write into one model's directory must not thereby read, and have served, what the
server's user can read elsewhere. Links that stay inside are everyday: a Kubernetes volume is made
of them (``config.pbtxt -> ..data/config.pbtxt``), and a repository may itself be a link.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.errors import LoadError

log = logging.getLogger(__name__)

#: What marks the directory of a Python environment: its links lead to the interpreter that it was made of.
_ENVIRONMENT = frozenset(("pyvenv.cfg", "conda-meta"))


def check(model_path: Path, roots: Iterable[str | Path]) -> None:
    """Raise `LoadError` for the first link at or below ``model_path`` that leads out of all repositories.

    ``roots`` are the other repositories; the model's own is the directory that it stands in.
    Looks into directories behind links, once each. Blocks.
    """
    inside = tuple(os.path.realpath(root) for root in (model_path.parent, *roots))
    for link, target in _links(str(model_path)):
        if not any(Path(target).is_relative_to(root) for root in inside):
            log.error("model '%s': '%s' is a link to '%s'", model_path.name, link, target)
            raise LoadError(
                f"'{os.path.relpath(link, model_path.parent)}' is a link that leads out of the model repository; "
                "--allow-external-links=true permits it"
            )


def _links(top: str) -> Iterator[tuple[str, str]]:
    """Every link at or below ``top``, and what is at its end. Hidden files are looked at, too: links hide there."""
    if Path(top).is_symlink():
        yield top, os.path.realpath(top)
    visited = {os.path.realpath(top)}
    waiting = [top]
    while waiting:
        entries = _list(waiting.pop())
        if not _ENVIRONMENT.isdisjoint(entry.name for entry in entries):
            continue
        for entry in entries:
            real = os.path.realpath(entry.path) if entry.is_symlink() else ""
            if real:
                yield entry.path, real
            if Path(entry.path).is_dir() and (place := real or os.path.realpath(entry.path)) not in visited:
                visited.add(place)
                waiting.append(entry.path)


def _list(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:  # a file that cannot be looked at cannot be loaded either, and that error is the better one
        return []
