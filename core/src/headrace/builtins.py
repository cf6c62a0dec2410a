"""The parts that come with core, registered through the same hooks as everybody else's."""

from __future__ import annotations

from headrace.backends.base import Backend
from headrace.caches.base import ResponseCache
from headrace.hookspecs import hookimpl
from headrace.schedulers.base import Scheduler
from headrace.storage.base import Storage


@hookimpl
def register_backends() -> list[type[Backend]]:
    from headrace.backends.identity import Identity

    return [Identity]


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler

    return [DirectScheduler, DynamicScheduler]


@hookimpl
def register_caches() -> list[type[ResponseCache]]:
    from headrace.caches.local import LocalCache

    return [LocalCache]


@hookimpl
def register_storages() -> list[type[Storage]]:
    from headrace.storage.local_storage import LocalStorage

    return [LocalStorage]
