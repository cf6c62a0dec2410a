"""The control mode ``on-demand`` for Headrace: a model is loaded at its first request, within a memory budget.

Flags: ``--model-control-mode=on-demand`` and those of `OnDemandOptions`.
"""

from __future__ import annotations

from headrace import Interceptor, OptionGroup, hookimpl
from headrace_on_demand.on_demand_mode import OnDemand
from headrace_on_demand.on_demand_options import OnDemandOptions

__all__ = ["OnDemand", "OnDemandOptions", "add_options", "register_interceptors"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [OnDemandOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [OnDemand]
