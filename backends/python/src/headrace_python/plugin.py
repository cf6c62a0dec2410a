"""The plugin: the entry point of this distribution.

It is not in `headrace_python` itself, because the process of a model may not have pluggy.
"""

from __future__ import annotations

from pathlib import Path

from headrace import Backend, ServerOptions, backend_settings, hookimpl
from headrace_python.backend import PythonBackend, find_python_based


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [PythonBackend]


@hookimpl
def find_backend(name: str, options: ServerOptions) -> type[Backend] | None:
    settings = backend_settings(PythonBackend.name, PythonBackend, options)
    return find_python_based(name, Path(options.backend_directory), settings)
