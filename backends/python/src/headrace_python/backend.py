"""The backend ``python``: chooses the process or thread that runs a ``model.py``, and its settings.

A python-based backend is a directory with a ``model.py`` that serves every model of that backend
(docs/spec/behaviours.md section 10.7). ``--backend-directory`` holds the directories, each of the name
that configs give as ``backend``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from headrace import (
    Backend,
    DeferredInstance,
    Isolation,
    LoadError,
    Model,
    ModelConfig,
    config_to_json,
    read_isolation,
    read_load_timeout,
)
from headrace_python.parameters import ENVIRONMENT, Parameters, Settings

if TYPE_CHECKING:
    from headrace_python.environment import Environment
    from headrace_python.instance import InstanceDescription, PythonInstance

#: The function that creates the instance in a model's process.
ENTRY = "headrace_python.entries:load"


class PythonBackend(Backend):
    """Serves ``<version>/model.py``: Triton's Python models, each instance in a process or a thread."""

    name = "python"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    hardware = "its models have used PyTorch on an NVIDIA H200, and passed tensors between processes on an H100"
    instance_classes = (DeferredInstance,)
    outputs_as_given = True
    #: In the server's process, ``breakpoint()`` has the terminal.
    dev_options: ClassVar[Mapping[str, str]] = {"isolation": "thread"}

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises `ConfigError` for a setting that Triton refuses."""
        super().__init__(options)
        self.settings = Settings.parse(options)

    def complete_config(self, model: Model) -> None:
        """Call the model's ``auto_complete_config``. Raises `LoadError` with Triton's words."""
        from headrace_python.completion import complete
        from headrace_python.module import find_source

        source = find_source(model.path, json.dumps(config_to_json(model.config)), self.options)
        environment = self._environment(model)
        load_s = read_load_timeout(model.config.parameters) or self.settings.load_timeout_s
        timeouts_s = self.settings.stub_timeout_s, load_s
        complete(model, source.file, source.folders, environment.python, environment.environ, *timeouts_s)

    def isolation(self, model: Model) -> Isolation | None:
        """Return a process in the model's environment, or None for a thread.

        It is None if the model has no environment, and its config or the backend's option ``isolation`` selects a
        thread.
        """
        from headrace_python.environment import PACKAGES

        isolation = read_isolation(model.config.parameters) or self.settings.isolation
        if isolation == "thread" and not self.environment_of(model):
            return None
        environment, settings = self._environment(model), self.settings
        timeouts_s = settings.stub_timeout_s, settings.load_timeout_s
        return Isolation(
            environment.python,
            environment.environ,
            ENTRY,
            PACKAGES,
            *timeouts_s,
            busy_poll_us=settings.busy_poll_us,
        )

    def repository_code(self, config: ModelConfig) -> str:
        from headrace_python.module import RUNTIME

        return config.default_model_filename or RUNTIME

    def load(self, model: Model) -> PythonInstance:
        """Return the instance for a thread of the server. Raises `LoadError` with Triton's words."""
        from headrace_python.instance import instance_of, is_decoupled
        from headrace_python.module import IsolatedModules
        from triton_python_backend_utils.runtime import Runtime

        if self.environment_of(model):
            raise LoadError(f"model '{model.name}' has {ENVIRONMENT}, which needs a process: isolation is 'thread'")
        description = description_of(model, self.options)
        decoupled = is_decoupled(json.loads(description.config))
        runtime = Runtime(model.name, str(model.version), decoupled, model.services, model_dir=str(model.path))
        modules = IsolatedModules(description.file, runtime, description.folders)
        with runtime.entered():
            model_class = modules.load_class(model.version)
        return instance_of(model_class, description, runtime, modules.close)

    def _environment(self, model: Model) -> Environment:
        from headrace_python.environment import find

        configured = _configured_environment(model)
        return find(configured or self.environment_of(model), model.path.parent, model.is_sent and bool(configured))

    def environment_of(self, model: Model) -> str:
        """Return the environment of the model; empty for the server's own."""
        return _configured_environment(model)


def _configured_environment(model: Model) -> str:
    """Return the environment in the config; empty if there is none. Read before parameters are parsed."""
    parameters = model.config.parameters
    return parameters[ENVIRONMENT].string_value if ENVIRONMENT in parameters else ""


def description_of(model: Model, options: Mapping[str, str]) -> InstanceDescription:
    """Return the description of the instance ``model`` for its code. Raises `LoadError` if it has no ``model.py``."""
    from headrace_python.instance import InstanceDescription
    from headrace_python.module import find_source

    config = json.dumps(config_to_json(model.config))
    source = find_source(model.path, config, options)
    return InstanceDescription(
        model.name,
        model.version,
        model.path,
        source.file,
        config,
        model.instance_name,
        model.device.kind,
        model.device.id,
        model.services,
        source.folders,
    )


class PythonBasedBackend(PythonBackend):
    """The backend ``name`` in ``directory``. ``python`` has the settings of the backend ``python``."""

    has_runtimes: ClassVar[bool] = True
    directory: ClassVar[Path]
    python: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def location(cls) -> str:
        return str(cls.directory / cls.name)

    def __init__(self, options: Mapping[str, str]) -> None:
        from headrace_python.module import BACKENDS

        super().__init__({**self.python, **options, BACKENDS: str(self.directory)})

    def repository_code(self, config: ModelConfig) -> str:
        return ""  # the code is the backend's

    def environment_of(self, model: Model) -> str:
        """Return the environment: the model's own, or the archive of the backend."""
        from headrace_python.module import RUNTIME

        packed = self.directory / self.name / f"pb_exec_env_{model.config.runtime or RUNTIME}.tar.gz"
        return super().environment_of(model) or (str(packed) if packed.is_file() else "")


def find_python_based(name: str, directory: Path, python: Mapping[str, str]) -> type[PythonBasedBackend] | None:
    """Return the backend of the directory ``name`` in ``directory``; None if it has no Python file."""
    folder = directory / name
    if folder.parent != directory or not any(folder.glob("*.py")):
        return None
    members = {"name": name, "directory": directory.absolute(), "python": python, "__doc__": PythonBasedBackend.__doc__}
    return cast("type[PythonBasedBackend]", type("PythonBasedBackend", (PythonBasedBackend,), members))
