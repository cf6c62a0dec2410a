"""The models whose files are code, and if that code runs in the server's process. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.backends.base import Backend
from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parameters import ISOLATION, THREAD
from headrace.config.path_checks import one_line
from headrace.errors import HeadraceError, LoadError
from headrace.models.configuring import has_processes, make_backend, needs_backend, parse
from headrace.server import Server
from headrace.storage.repositories import Entry, Repositories

_OPERATIONS = "model_operations"
#: Matches a model's config file and its alternatives (``--model-config-name``).
_CONFIGS = ("config.pbtxt", "configs")


@dataclass(frozen=True, slots=True)
class ModelCode:
    """``code`` of the model ``name``, such as ``model.py``, that runs when it is served.

    ``is_flag``: it runs in the server's process because of an option of its backend, and not of its config.
    """

    name: str
    code: str
    in_server: bool
    is_flag: bool = False


@dataclass(frozen=True, slots=True)
class UnreadModel:
    """A model that could not be read, or all of them if ``name`` is empty, with the ``reason``."""

    name: str
    reason: str


def model_code(server: Server) -> Iterator[ModelCode | UnreadModel]:
    """Yield each model of the repositories of ``server`` that runs code of its own files, by the names of the models.

    The config is read as it is in the repository, before repository agents change it. A model whose backend is not
    installed runs nothing. Blocks while configs are fetched.
    """
    repositories = Repositories(server.options, server.plugins.storages)
    backends: dict[str, Backend] = {}
    try:
        for name, entry in repositories.scan().items():
            try:
                yield from _of_model(server, entry, backends)
            except HeadraceError as error:
                yield UnreadModel(name, error.message)
    except HeadraceError as error:
        yield UnreadModel("", error.message)
    finally:
        repositories.close()


def _of_model(server: Server, entry: Entry, backends: dict[str, Backend]) -> Iterator[ModelCode]:
    options, plugins = server.options, server.plugins
    files = entry.fingerprint().files
    with entry.fetch([path for path in files if path.partition("/")[0] in _CONFIGS]) as directory:
        config = parse(directory.path, options)
        derive(config, entry.name, files, needs_backend=needs_backend(config, plugins.schedulers))
    if not config.backend:
        return
    try:
        backend = backends.get(config.backend) or make_backend(config.backend, plugins.backends, plugins.hook, options)
    except LoadError:  # the model cannot be loaded
        return
    backends[config.backend] = backend
    if code := ", ".join(_code(backend, config)):
        is_flag = ISOLATION not in config.parameters and backend.options.get(ISOLATION) == THREAD
        in_server = is_flag or not has_processes(backend, config, plugins.executors)
        yield ModelCode(entry.name, code, in_server, is_flag)


def _code(backend: Backend, config: ModelConfig) -> Iterator[str]:
    if code := backend.repository_code(config):
        yield one_line(code)
    if backend.engine_fields is None or _OPERATIONS in backend.engine_fields:
        yield from map(one_line, config.model_operations.op_library_filename)
