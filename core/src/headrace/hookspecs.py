"""All hooks of Headrace, in the order of a server's life.

A plugin is a module with functions that are marked `hookimpl` and have the names below. It is found through an entry
point of the group ``headrace``. An implementation may take fewer arguments than its specification.

Hooks register the parts; methods of the parts handle the requests: no hook is ever called per request. All hooks are
called on the thread that starts or stops the server, or, if they concern a model, on threads that may block. No hook is
called twice at the same time for one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from headrace.agents.base import RepositoryAgent
    from headrace.backends.base import Backend
    from headrace.caches.base import ResponseCache
    from headrace.command import Command
    from headrace.config.option_groups import OptionGroup
    from headrace.config.options import ServerOptions
    from headrace.executors.kind import ExecutorKind
    from headrace.frontends.base import Frontend
    from headrace.frontends.extension import Extension
    from headrace.models.interceptors import Interceptor
    from headrace.models.served import ServedModel
    from headrace.schedulers.base import Scheduler
    from headrace.server import Server
    from headrace.storage.base import Storage
    from headrace.telemetry.executions import Observer

hookspec = pluggy.HookspecMarker("headrace")
hookimpl = pluggy.HookimplMarker("headrace")

# ---------------------------------------------------------------------------
# At start, once: register the parts
# ---------------------------------------------------------------------------


@hookspec
def register_backends() -> Sequence[type[Backend]]:  # type: ignore[empty-body]
    """Return the backend classes of this plugin. Configs refer to a backend by its ``name``.

    Called once per server, before anything is loaded. Two classes with one name are an error that names both
    distributions. An exception marks this plugin as broken, and no other. Do not import the engine here.
    """


@hookspec
def register_schedulers() -> Sequence[type[Scheduler]]:  # type: ignore[empty-body]
    """Return the scheduler classes of this plugin. A model selects one by its parameter ``scheduler`` or its
    ``scheduling_choice``.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_executors() -> Sequence[type[ExecutorKind]]:  # type: ignore[empty-body]
    """Return the kinds of executor of this plugin: where instances run. A model selects one by its parameter
    ``isolation``.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_frontends() -> Sequence[type[Frontend]]:  # type: ignore[empty-body]
    """Return the frontend classes of this plugin. ``headrace serve`` starts each one that is enabled.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_caches() -> Sequence[type[ResponseCache]]:  # type: ignore[empty-body]
    """Return the response cache classes of this plugin. ``--cache-config`` selects one by ``name``; a server has at
    most one.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_storages() -> Sequence[type[Storage]]:  # type: ignore[empty-body]
    """Return the storage classes of this plugin. ``name`` is the URL scheme of the ``--model-repository`` that each
    reads.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_agents() -> Sequence[type[RepositoryAgent]]:  # type: ignore[empty-body]
    """Return the repository agent classes of this plugin. ``name`` is the name in a model's
    ``model_repository_agents``.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_extensions() -> Sequence[type[Extension]]:  # type: ignore[empty-body]
    """Return the extension classes of this plugin: its additions to the protocols. The server makes one object of each.

    Called once per server, before anything is loaded; same rules as `register_backends`. Two additions with the same
    address, such as two routes to one path, are an error that names both distributions. An addition that callers could
    not tell apart from one of Headrace's own breaks its plugin.
    """


@hookspec
def register_interceptors() -> Sequence[type[Interceptor]]:  # type: ignore[empty-body]
    """Return the interceptor classes of this plugin. The server creates one object of each that is enabled.

    Called once per server, before anything is loaded; same rules as `register_backends`. An operation passes the
    interceptors of core first, then those of plugins in the order of the names of their entry points; those that are
    `Interceptor.first` before all.
    """


@hookspec
def register_commands() -> Sequence[type[Command]]:  # type: ignore[empty-body]
    """Return the command classes of this plugin; ``name`` follows ``headrace`` on the command line.

    Called by the command line for a command that is not core's own, and once per server; same rules as
    `register_backends`. A command that has the name of one of core's breaks its plugin.
    """


@hookspec
def add_options() -> Sequence[type[OptionGroup]]:  # type: ignore[empty-body]
    """Return the option groups of this plugin: frozen dataclasses whose fields become flags of ``headrace serve``.

    Called once per server, before the command line is read; same rules as `register_backends`. Parts read their values
    by ``options.group(TheirClass)``.
    """


@hookspec
def server_started(server: Server) -> None:
    """The start-up models are loaded, the ports are open, and the server is about to take requests.

    Called once, on the event loop's thread; must not block. An exception stops the server.
    """


# ---------------------------------------------------------------------------
# Per model: load and unload
# ---------------------------------------------------------------------------


@hookspec(firstresult=True)
def find_backend(name: str, options: ServerOptions) -> type[Backend] | None:
    """Return the backend class for ``backend: name`` in a config, if no plugin has registered one.

    Called on a loading thread when a model first needs the name, until one plugin returns a class. Return None to let
    other plugins answer. An exception fails the load.
    """


@hookspec
def observe_model(model: ServedModel, options: ServerOptions) -> Observer | None:
    """Return an observer of the executions of ``model``, or None. ``options`` are the server's; they may be left out.

    Called once per loaded version, on a loading thread, before it takes requests. The observer is called once per
    batch, on the instance's thread. It is called on the event loop for an instance in a process of its own, and for
    answers after their batch. An exception fails the load.
    """


@hookspec
def model_loaded(model: ServedModel) -> None:
    """``model`` is loaded, and takes requests next.

    Called once per loaded version, on a loading thread, which may go on as that of the instance: do not wait here for a
    response of this model. An exception is logged.
    """


@hookspec
def model_unloaded(model: ServedModel) -> None:
    """``model`` has answered its last request, and its instances are closed.

    Called once per unloaded version, on a thread that may block. An exception is logged.
    """


# ---------------------------------------------------------------------------
# At stop
# ---------------------------------------------------------------------------


@hookspec
def server_stopping(server: Server) -> None:
    """The server has begun to stop. Requests in flight are still being answered.

    Called once, on the event loop's thread; must not block. An exception is logged.
    """
