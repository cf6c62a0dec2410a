"""Where the packages of the server's installation are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path


def folders_of(packages: Iterable[str]) -> Mapping[str, str]:
    """The folder in which each package lies; a name that is no package here is left out."""
    specs = ((package, importlib.util.find_spec(package)) for package in packages)
    return {name: str(Path(spec.origin).parents[1]) for name, spec in specs if spec is not None and spec.origin}
