"""The parts of core, registered by the same hooks as parts of plugins."""

from __future__ import annotations

from headrace.backends.base import Backend
from headrace.caches.base import ResponseCache
from headrace.executors.kind import ExecutorKind
from headrace.frontends.extension import Extension
from headrace.hookspecs import hookimpl
from headrace.models.interceptors import Interceptor
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
def register_executors() -> list[type[ExecutorKind]]:
    from headrace.executors.thread_kind import ThreadExecutors

    return [ThreadExecutors]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    from headrace.frontends.access import RestrictedApis
    from headrace.frontends.header_forwarding import ForwardedHeaders

    return [RestrictedApis, ForwardedHeaders]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    from headrace.frontends.request_extensions import METADATA_ONLY

    return METADATA_ONLY


@hookimpl
def register_caches() -> list[type[ResponseCache]]:
    from headrace.caches.local import LocalCache

    return [LocalCache]


@hookimpl
def register_storages() -> list[type[Storage]]:
    from headrace.storage.local_storage import LocalStorage

    return [LocalStorage]
