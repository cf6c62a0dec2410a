"""The HTTP frontend: the KServe v2 protocol with Triton's extensions (docs/spec/behaviours.md section 1).

Hosts share one core that is independent of the transport. `protocol` is the default and implements HTTP/1.1. A plugin
adds a host by `HttpHost` and the ASGI application of `asgi`. ``--http-server`` selects one. All turn bytes into an
`HttpRequest`, pass it to `Routes.dispatch`, and write the `HttpReply`::

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
