"""OpenAPI for Headrace: ``/openapi.json`` describes the routes and the models, and ``/docs`` shows it in a browser."""

from __future__ import annotations

from headrace import Extension, OptionGroup, hookimpl
from headrace_openapi.description_routes import OpenApi, OpenApiDocs, OpenApiOptions

__all__ = ["OpenApi", "OpenApiDocs", "OpenApiOptions"]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [OpenApi, OpenApiDocs]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [OpenApiOptions]
