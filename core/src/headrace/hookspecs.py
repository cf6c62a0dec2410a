"""Every extension point of Headrace, in the order in which a server's life meets them.

A plugin is a module with functions that carry `hookimpl` and the names below, found through an
entry point of the group ``headrace``. An implementation may take fewer arguments than its
specification. Hooks choose the parts; methods of the parts move the data: no hook is ever called
per request. All hooks are called on the thread that starts or stops the server, or, for those
per model, on threads that may block; never concurrently with themselves for one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from headrace.agents.base import RepositoryAgent
    from headrace.backends.base import Backend
    from headrace.caches.base import ResponseCache
    from headrace.config.option_groups import OptionGroup
    from headrace.config.options import ServerOptions
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
# At start, once: which parts exist
# ---------------------------------------------------------------------------


@hookspec
def register_backends() -> Sequence[type[Backend]]:  # type: ignore[empty-body]
    """The backend classes of this plugin; each has a ``name``, which configs refer to.

    Called once per server, before anything is loaded. Two classes of one name are an error that
    names both distributions. A raise marks the plugin broken and leaves the others alone. Do not
    import the engine here.
    """


@hookspec
def register_schedulers() -> Sequence[type[Scheduler]]:  # type: ignore[empty-body]
    """The scheduler classes of this plugin; ``name`` is what a model's parameter ``scheduler`` or its
    ``scheduling_choice`` says.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_frontends() -> Sequence[type[Frontend]]:  # type: ignore[empty-body]
    """The frontend classes of this plugin; ``headrace serve`` starts each that is enabled.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_caches() -> Sequence[type[ResponseCache]]:  # type: ignore[empty-body]
    """The response cache classes of this plugin; ``name`` is what ``--cache-config`` says. A server has one at most.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_storages() -> Sequence[type[Storage]]:  # type: ignore[empty-body]
    """The storage classes of this plugin; ``name`` is the URL scheme of the ``--model-repository`` that each reads.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_agents() -> Sequence[type[RepositoryAgent]]:  # type: ignore[empty-body]
    """The repository agent classes of this plugin; ``name`` is what a model's ``model_repository_agents`` says.

    Called once per server, before anything is loaded; same rules as `register_backends`.
    """


@hookspec
def register_extensions() -> Sequence[type[Extension]]:  # type: ignore[empty-body]
    """Return the extension classes of this plugin: what it adds to the protocols. The server makes one object of each.

    Called once per server, before anything is loaded; same rules as `register_backends`. Two additions that callers
    could not tell apart, such as two routes to one path, are an error that names both distributions. An addition that
    callers could not tell apart from one of Headrace's own breaks its plugin.
    """


@hookspec
def register_interceptors() -> Sequence[type[Interceptor]]:  # type: ignore[empty-body]
    """Return the interceptor classes of this plugin; the server makes one object of each that is enabled.

    Called once per server, before anything is loaded; same rules as `register_backends`. An operation passes the
    interceptors of core first, then those of plugins in the order of their entry points' names.
    """


@hookspec
def add_options() -> Sequence[type[OptionGroup]]:  # type: ignore[empty-body]
    """The option groups of this plugin: frozen dataclasses, whose fields become flags of ``headrace serve``.

    Called once per server, before the command line is read; same rules as `register_backends`. What
    they are set to is what parts find in ``options.group(TheirClass)``.
    """


@hookspec
def server_started(server: Server) -> None:
    """The server has loaded its start-up models and is about to take requests; its ports are open.

    Called once, on the event loop's thread; must not block. A raise stops the server.
    """


# ---------------------------------------------------------------------------
# Per model: load and unload
# ---------------------------------------------------------------------------


@hookspec(firstresult=True)
def find_backend(name: str, options: ServerOptions) -> type[Backend] | None:
    """The backend class for the config's ``backend`` of ``name``, where no plugin has registered one.

    Called on a loading thread when a model first needs the name, until one plugin has an answer;
    None leaves the question to the others. A raise fails the load.
    """


@hookspec
def observe_model(model: ServedModel) -> Observer | None:
    """An observer of the executions of ``model``, or None.

    Called once for each version loaded, on a loading thread, before it takes requests. The
    observer is then called once per batch, on the instance's thread, and on the event loop for an
    instance in a process of its own and for answers that come after their batch. A raise fails the
    load.
    """


@hookspec
def model_loaded(model: ServedModel) -> None:
    """``model`` is ready and takes requests.

    Called once for each version loaded, on a loading thread. A raise is logged.
    """


@hookspec
def model_unloaded(model: ServedModel) -> None:
    """``model`` has answered its last request and its instances are closed.

    Called once for each version unloaded, on a thread that may block. A raise is logged.
    """


# ---------------------------------------------------------------------------
# At stop
# ---------------------------------------------------------------------------


@hookspec
def server_stopping(server: Server) -> None:
    """The server has been told to stop; in-flight requests are still being answered.

    Called once, on the event loop's thread; must not block. A raise is logged.
    """
