"""What Penstock finds of this distribution: its entry point.

Apart from `penstock_python` itself, because a process of a model's own need not have pluggy.
"""

from __future__ import annotations

from penstock import hookimpl
from penstock.backends.base import Backend
from penstock_python.backend import PythonBackend


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [PythonBackend]
