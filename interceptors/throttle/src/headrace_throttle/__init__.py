"""The interceptor ``throttle`` for Headrace: limits the inferences of each caller, per second and at once.

Flags: ``--throttle-rate``, ``--throttle-burst`` and ``--throttle-concurrent``. Without one of them it does nothing.
"""

from __future__ import annotations

from headrace import Interceptor, OptionGroup, hookimpl
from headrace_throttle.caller_quotas import Throttle
from headrace_throttle.throttle_options import ThrottleOptions

__all__ = ["Throttle", "ThrottleOptions", "add_options", "register_interceptors"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [ThrottleOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Throttle]
