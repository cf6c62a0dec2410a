"""The files of a model while it is loaded: from its storage, or as its repository agents have changed them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.agents.agent_chain import AgentChain, AgentClasses
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.option_parts import ConfigOptions
from headrace.config.parse import find_config, place_of
from headrace.errors import ConfigError, HeadraceError
from headrace.models.configuring import parse
from headrace.models.versions import files_of
from headrace.storage.local_directory import LocalDirectory
from headrace.storage.local_storage import files_below
from headrace.storage.repositories import Entry, Fingerprint


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is being loaded. ``directory`` has the ``files`` that all versions share.

    If ``is_whole``, it has the files of all versions, which are loaded from it. ``config`` is the written config.
    """

    entry: Entry
    directory: LocalDirectory
    files: Mapping[str, Hashable]
    config: ModelConfig
    is_whole: bool = False
    is_replaced: bool = False
    agents: AgentChain | None = None

    def __post_init__(self) -> None:
        if self.entry.is_mapped:
            self.config.name = self.entry.name

    def fetch(self, version: int) -> LocalDirectory:
        """Return the directory to load ``version`` from. The caller gives it back. Blocks."""
        return self.directory.share() if self.is_whole else self.entry.fetch(files_of(self.files, version))

    @property
    def blocks(self) -> bool:
        """True if `close` may block: it calls agents, or removes files."""
        return self.agents is not None or not self.entry.repositories[0].whole

    def close(self, *, is_loaded: bool) -> None:
        """End the load. Blocks if `blocks`."""
        if self.agents is not None:
            self.agents.ended(is_loaded=is_loaded)
        self.directory.release()


def open_model(
    entry: Entry, fingerprint: Fingerprint, options: ConfigOptions, classes: AgentClasses | None
) -> OpenedModel:
    """Return the opened ``entry``, with the files of ``fingerprint``, after its agents have acted on it.

    ``classes`` are the agent classes, if there are any. Blocks. Raises `HeadraceError`.
    """
    files = fingerprint.files
    directory = entry.fetch(files if entry.is_temporary else files_of(files))
    try:
        with placed(directory, options, is_sent=entry.is_sent):
            config = parse(directory.path, options) if entry.config is None else _copy(entry.config)
        if classes is not None and config.model_repository_agents.agents:
            with directory:  # the agents get one of their own, with the whole model
                return _open_with_agents(entry, files, config, options, AgentChain(entry.name, config, classes))
    except BaseException:
        directory.release()
        raise
    return OpenedModel(entry, directory, files, config, is_whole=entry.is_temporary or entry.repositories[0].whole)


def _open_with_agents(
    entry: Entry, files: Mapping[str, Hashable], config: ModelConfig, options: ConfigOptions, agents: AgentChain
) -> OpenedModel:
    fetched = entry.fetch(files)
    directory = agents.load(fetched, entry.new_directory)
    is_replaced = directory.path != fetched.path
    try:
        if is_replaced:
            files = files_below(directory.path)
            if entry.config is None and find_config(directory.path, options.model_config_name) is not None:
                with placed(directory, options, is_sent=False):
                    config = parse(directory.path, options)
    except BaseException:
        agents.ended(is_loaded=False)
        directory.release()
        raise
    return OpenedModel(entry, directory, files, config, True, is_replaced, agents)


@contextmanager
def placed(directory: LocalDirectory, options: ConfigOptions, *, is_sent: bool) -> Iterator[None]:
    """Add to a `ConfigError` the line of the config file at fault. Remove private directories from messages."""
    try:
        yield
    except HeadraceError as error:
        error.args = (directory.hide(error.message), *error.args[1:])
        if isinstance(error, ConfigError) and error.field and not (is_sent or error.line):
            path = find_config(directory.path, options.model_config_name)
            error.place = place_of(error.field, path) if path is not None else ""
        raise


def _copy(config: ModelConfig) -> ModelConfig:
    return ModelConfig.FromString(config.SerializeToString())
