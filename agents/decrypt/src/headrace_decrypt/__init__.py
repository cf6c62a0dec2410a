"""The repository agent ``decrypt`` and the command ``headrace encrypt``: models that are encrypted in the repository.

A model is encrypted by ``headrace encrypt``, and its config names the agent and where the keys are::

    model_repository_agents {
      agents { name: "decrypt" parameters { key: "key_file" value: "/etc/headrace/model-keys" } }
    }

When the model is loaded, its files are decrypted to a private directory, which is removed when the model is unloaded.
"""

from __future__ import annotations

from headrace import Command, RepositoryAgent, hookimpl
from headrace_decrypt.decrypt_agent import Decrypt

__all__ = ["Decrypt"]


@hookimpl
def register_agents() -> list[type[RepositoryAgent]]:
    return [Decrypt]


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_decrypt.encrypt_command import Encrypt

    return [Encrypt]
