"""The interface of a repository agent: it acts when a model is loaded and unloaded, and may replace its directory.

A model's config names its agents, in order, in ``model_repository_agents``. Source: docs/spec/behaviours.md section
11.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar


class RepositoryAgent:
    """Acts on one load of one model. Each method is called at most once, on threads that may block.

    A load ends with `load_complete` or `load_fail`. Only a completed one is followed by `unload` and `unload_complete`.
    An exception of `load` fails the load; exceptions of the other methods are logged.
    """

    #: The name in ``model_repository_agents``.
    name: ClassVar[str]

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        """Create the agent with the ``parameters`` of the config. Raise `ConfigError` if they are invalid."""
        self.model = model
        self.parameters = parameters

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        """Return the directory to load the model from: ``directory``, or another one.

        ``directory`` has the whole model with all its versions, as the agent before returned it. Do not write to it.

        ``new_directory()`` returns a new, empty, private directory. Core removes it when the model is unloaded, when
        the load fails, or, after the server was killed, at the next start. If another directory is returned, the config
        is read from there.
        """
        return directory

    def load_complete(self) -> None:
        """Called when the model is loaded and takes requests."""

    def load_fail(self) -> None:
        """Called when the load has failed, because of a later agent or of the model."""

    def unload(self) -> None:
        """Called when the last version from the directory has closed. The directory still exists."""

    def unload_complete(self) -> None:
        """Called when the directory is removed, if it was a new one."""
