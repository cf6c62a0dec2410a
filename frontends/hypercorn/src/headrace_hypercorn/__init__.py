"""Another host of HTTP for Headrace: hypercorn, which also speaks HTTP/2.

::

    headrace serve --http-server=hypercorn ...

It answers what the native host answers, and takes the same flags ``--http-...``.
"""

from __future__ import annotations

from headrace import Frontend, hookimpl
from headrace_hypercorn.frontend import HypercornFrontend

__all__ = ["HypercornFrontend"]


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    return [HypercornFrontend]
