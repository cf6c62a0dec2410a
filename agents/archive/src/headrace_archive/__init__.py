"""The repository agent ``archive``: models that are packed in the repository and unpacked at their load.

The directory of such a model has an archive (``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.zst``, ``.zip``, or TorchServe's
``.mar``) and a config that names the agent::

    model_repository_agents { agents { name: "archive" } }

It is unpacked to a private directory, which is removed when the model is unloaded. Harmful archives are refused:
 links, devices, names that leave the directory, and more content than the limits allow.
"""

from __future__ import annotations

from headrace import RepositoryAgent, hookimpl
from headrace_archive.archive_agent import Archive

__all__ = ["Archive"]


@hookimpl
def register_agents() -> list[type[RepositoryAgent]]:
    return [Archive]
