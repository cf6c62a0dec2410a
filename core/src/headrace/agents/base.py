"""What a repository agent implements: it acts when a model is loaded and unloaded, and may replace its directory.

A model's config names its agents, in order, in ``model_repository_agents``.
Source: docs/spec/behaviours.md section 11.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar


class RepositoryAgent:
    """Acts on one load of one model. Each method is called at most once, on threads that may block.

    A load ends with `load_complete` or `load_fail`. Only a completed one is followed by `unload` and `unload_complete`.
    What `load` raises fails the load; what the others raise is logged.
    """

    #: What ``model_repository_agents`` calls it.
    name: ClassVar[str]

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        """``parameters`` are those of the config. Raise `ConfigError` if they cannot be right."""
        self.model = model
        self.parameters = parameters

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        """Return the directory to load the model from: ``directory``, or another in its place.

        ``directory`` holds the whole model, with all its versions, as the agent before this one returned it. Do not
        write to it. ``new_directory()`` returns a new, empty, private one, which core removes when the model is
        unloaded, when the load fails, and after the server was killed. If another directory is returned, the config is
        read from there.
        """
        return directory

    def load_complete(self) -> None:
        """The model is loaded and takes requests."""

    def load_fail(self) -> None:
        """The model could not be loaded, because of a later agent, or of the model."""

    def unload(self) -> None:
        """The last version that was loaded from the directory has closed. The directory is still there."""

    def unload_complete(self) -> None:
        """The directory is gone, if it was a new one."""
