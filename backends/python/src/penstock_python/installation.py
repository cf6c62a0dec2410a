"""What a foreign interpreter imports from the server's installation, and nothing else of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

#: Top-level packages; they need no more than NumPy.
PACKAGES = ("penstock", "penstock_python", "triton_python_backend_utils")


def folders_of() -> Mapping[str, str]:
    """The folder that each of `PACKAGES` lies in."""
    return {package: _folder(package) for package in PACKAGES}


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[1])
