"""Another host of HTTP for Headrace: hypercorn, which also speaks HTTP/2, and ends TLS.

::

    headrace serve --http-server=hypercorn --hypercorn-certificate=server.crt --hypercorn-key=server.key ...

It answers what the native host answers, and takes the same flags ``--http-...``. `HypercornOptions` has its own flags.
"""

from __future__ import annotations

from headrace import Frontend, OptionGroup, hookimpl
from headrace_hypercorn.frontend import HypercornFrontend, HypercornOptions

__all__ = ["HypercornFrontend", "HypercornOptions"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [HypercornOptions]


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    return [HypercornFrontend]
