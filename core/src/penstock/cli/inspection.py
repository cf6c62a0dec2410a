"""One model of a repository, looked at without loading it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.backends.base import Backend, Model
from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.options import ServerOptions
from penstock.config.parameters import parse_parameters
from penstock.config.parse import find_config, read_config
from penstock.config.provenance import Completion, completions
from penstock.errors import PenstockError
from penstock.models.configuring import complete, read
from penstock.models.labels import read_labels
from penstock.models.repository import Entry, available_versions, select_versions
from penstock.models.signature import Signature
from penstock.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where: ``line`` and ``column`` count from 1, and are 0 where no place is known."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f":{self.line}:{self.column}" if self.line else ""
        return f"{self.file}{place}: {self.message}"


@dataclass(slots=True)
class Finding:
    """What is wrong with a model, and which fields were filled in, by whom.

    ``path`` is the config file, or the model's directory if there is none.
    """

    model: str
    path: str
    problems: list[Problem] = field(default_factory=list)
    completed: list[Completion] = field(default_factory=list)


def inspect(entry: Entry, options: ServerOptions, plugins: Plugins) -> Finding:
    """Read, derive, complete and validate the config of ``entry``, as loading it would."""
    found = Finding(entry.name, str(find_config(entry.path, options.model_config_name) or entry.path))
    if entry.is_duplicate:
        paths = ", ".join(map(str, entry.paths))
        found.problems.append(Problem(found.path, 0, 0, f"model appears in two or more repositories: {paths}"))
        return found
    try:
        _inspect(entry, options, plugins, found)
    except PenstockError as error:
        found.problems.append(_locate(found.path, error.message.strip()))
    return found


def _inspect(entry: Entry, options: ServerOptions, plugins: Plugins, found: Finding) -> None:
    path = find_config(entry.path, options.model_config_name)
    written = read_config(path) if path is not None else ModelConfig()
    derived = read(entry.path, options)
    found.completed += completions(written, derived, "Penstock")
    backend = _backend(plugins, derived.backend, options)
    for version in select_versions(entry.name, derived.version_policy, available_versions(entry.path)):
        final = _complete(entry, version, derived, backend, options)
        news = completions(derived, final, f"backend {backend.name}")
        found.completed += [completion for completion in news if completion not in found.completed]


def _backend(plugins: Plugins, name: str, options: ServerOptions) -> Backend:
    settings = options.backend_config
    return plugins.backends.get(name)({**settings.get("", {}), **settings.get(name, {})})


def _complete(
    entry: Entry, version: int, derived: ModelConfig, backend: Backend, options: ServerOptions
) -> ModelConfig:
    """The config of one version as its instances would see it; raises `PenstockError`."""
    config = ModelConfig.FromString(derived.SerializeToString())
    complete(Model(entry.name, version, entry.path / str(version), config), backend, options)
    parse_parameters(backend.Parameters, config.parameters)
    Signature(entry.name, config)
    read_labels(config, entry.path)
    return config


def _locate(path: str, message: str) -> Problem:
    """The place that the message names, or else that of a quoted word which the file has once."""
    named = re.match(rf"{re.escape(path)}:(\d+)(?::(\d+))?: ", message)
    if named:
        return Problem(path, int(named[1]), int(named[2] or 1), message[named.end() :])
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    for word in re.findall(r"'([^']+)'", message):
        places = [found.start() for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
        if len(places) == 1:
            before = text[: places[0]]
            return Problem(path, before.count("\n") + 1, places[0] - before.rfind("\n"), message)
    return Problem(path, 0, 0, message.removeprefix(f"{path}: "))
