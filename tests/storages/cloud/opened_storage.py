"""Storages for tests, opened as by a server."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal

from headrace import ServerOptions, Storage
from headrace_cloud import CloudStorageOptions, register_storages


def open_storage(url: str, mode: Literal["none", "poll", "explicit"] = "none", **options: Any) -> Storage:
    """Return the storage of ``url``. ``options`` are those of the plugin, ``mode`` is the control mode."""
    storages = {each.name: each for each in register_storages()}
    kind = storages.get(url.partition("://")[0], storages["*"])
    groups = (CloudStorageOptions(**options),)
    return kind(url, ServerOptions(model_repository=(url,), model_control_mode=mode, plugin_options=groups))


def new_directories(parent: Path) -> Callable[[], Path]:
    """Return a function that makes directories as core does."""
    numbers = count()

    def make() -> Path:
        path = parent / str(next(numbers))
        path.mkdir(parents=True)
        return path

    return make
