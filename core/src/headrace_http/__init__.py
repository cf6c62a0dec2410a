"""The HTTP frontend: the KServe v2 protocol with Triton's extensions (docs/spec/behaviours.md section 1).

Two hosts stand above one transport-neutral core. `protocol` speaks HTTP/1.1 and is the
default; `asgi` is an ASGI app, run by hypercorn where HTTP/2 is wanted. ``--http-server`` chooses.
Both turn bytes into an `HttpRequest`, hand it to `Routes.dispatch`, and write the `HttpReply`
that comes back::

    bytes -> host -> Routes -> InferenceHandler: decode -> submit ... respond -> encode -> host -> bytes
"""

from __future__ import annotations

from headrace import Extension, Frontend, hookimpl


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    from headrace_http.frontend import HttpFrontend
    from headrace_http.metrics_frontend import MetricsFrontend

    return [HttpFrontend, MetricsFrontend]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    from headrace_http.http_extensions import OWN

    return OWN
