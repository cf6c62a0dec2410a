"""Routers for Headrace: a virtual model that splits its requests between other models, or versions of one.

::

    parameters { key: "scheduler" value { string_value: "router" } }
    parameters { key: "scheduler.targets" value { string_value: "digits:1 = 90, digits:2 = 10" } }

A router needs neither a backend nor files, only an empty version directory. Its inputs and outputs are those of its
first target, the baseline. Weights are changed while it serves, by ``PUT /v2/models/{model}/traffic``.

::

    RouterScheduler   calls the target that a `Decider` chooses, and forwards its answers     (router_scheduler)
    Decider           rules, sticky keys, sequences, weights                                  (decisions)
    Split             chooses by weights, in turn or by a key                                 (splitting)
    RoutingTable      the model's parameters, checked                                         (table_parameters)
    Shadow            gets copies of requests, whose outputs are compared                     (shadow, differences)
    RollbackRule      moves the requests of a target that is worse than the baseline         (rollback, windows)
    RouterHeaders     an interceptor: lets routers read headers                               (header_reader)
    Traffic           an extension: the split, read and changed over HTTP                     (traffic, board)
    headrace traffic  the same from the command line                                          (traffic_command)
"""

from __future__ import annotations

from headrace import (
    Command,
    ConfigError,
    Extension,
    Interceptor,
    Observer,
    OptionGroup,
    Scheduler,
    ServedModel,
    ServerOptions,
    hookimpl,
)
from headrace_router.header_reader import RouterHeaders
from headrace_router.router_options import RouterOptions
from headrace_router.router_scheduler import RouterScheduler, router_of
from headrace_router.traffic import Traffic
from headrace_router.traffic_command import TrafficCommand

__all__ = ["RouterScheduler", "Traffic"]


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    return [RouterScheduler]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Traffic]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [RouterHeaders]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [TrafficCommand]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [RouterOptions]


@hookimpl
def observe_model(model: ServedModel, options: ServerOptions) -> Observer | None:
    """Restore the weights of a router that is loaded again."""
    router = router_of(model.config)
    if router is not None:
        settings = options.group(RouterOptions)
        if router.table.reads_headers and not settings.headers:
            raise ConfigError(f"router '{model.name}' decides by a header: start the server with --router-headers=true")
        if router.shadow is not None:
            router.shadow.limit = settings.shadows
        settings.board.join(router, model.name, model.version)
    return None
