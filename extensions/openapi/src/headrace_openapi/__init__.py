"""OpenAPI for Headrace: ``/openapi.json`` describes the routes and the models, and ``/docs`` shows it in a browser."""

from __future__ import annotations

from headrace import Extension, OptionGroup, ServedModel, hookimpl
from headrace_openapi.description_routes import OpenApi, OpenApiDocs, OpenApiOptions, note_change

__all__ = ["OpenApi", "OpenApiDocs", "OpenApiOptions"]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [OpenApi, OpenApiDocs]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [OpenApiOptions]


@hookimpl
def model_loaded(model: ServedModel) -> None:
    note_change()


@hookimpl
def model_unloaded(model: ServedModel) -> None:
    note_change()
