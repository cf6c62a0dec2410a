"""The routes of SageMaker and Vertex AI, each on a port of its own (docs/spec/behaviours.md sections 12.5 and 12.6)."""

from __future__ import annotations

from headrace import Frontend, hookimpl


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    from headrace_cloud_routes.sagemaker import SageMaker
    from headrace_cloud_routes.vertex_ai import VertexAi

    return [SageMaker, VertexAi]
