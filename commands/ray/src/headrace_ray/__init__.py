"""Headrace on Ray Serve: each replica serves a model repository in its own process, behind Ray's router.

::

    from ray import serve
    import headrace_ray

    handle = serve.run(headrace_ray.deployment("/srv/models", num_replicas=2))
    scores = handle.infer.remote("digits", {"image": image}).result()["scores"]

The same as a command: ``headrace ray --model-repository=/srv/models --replicas=2``.
"""

from __future__ import annotations

from headrace import Command, hookimpl
from headrace_ray.ray_command import RayCommand
from headrace_ray.replica import Replica
from headrace_ray.serve_application import application, deployment

__all__ = ["RayCommand", "Replica", "application", "deployment", "register_commands"]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [RayCommand]
