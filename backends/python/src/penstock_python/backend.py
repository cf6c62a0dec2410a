"""The backend ``python``: which process or thread runs a ``model.py``, and on which terms."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.backends.base import Backend, Isolation, Model
from penstock.config.json_form import to_json
from penstock_python.completion import complete
from penstock_python.description import Description, is_decoupled, model_file
from penstock_python.instance import PythonInstance, instance_of
from penstock_python.parameters import Parameters
from penstock_python.private import PrivateModules
from penstock_python.settings import Settings
from triton_python_backend_utils.runtime import Runtime

#: Makes the instance in a process of its own.
ENTRY = "penstock_python.entry:load"


class PythonBackend(Backend):
    """Serves ``<version>/model.py``: Triton's Python models, each instance in a process or a thread."""

    name = "python"
    Parameters = Parameters
    devices = ("gpu", "cpu")

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises `ConfigError` for a setting that Triton refuses."""
        super().__init__(options)
        self.settings = Settings.parse(options)

    def complete_config(self, model: Model) -> None:
        """Ask the model's ``auto_complete_config``. Raises `LoadError` with Triton's words."""
        file = model_file(model.path, json.dumps(to_json(model.config)))
        complete(model, file, timeout_s=self.settings.stub_timeout_s)

    def isolation(self, model: Model) -> Isolation | None:
        """A process, unless the backend's option ``isolation`` is ``thread``."""
        if self.settings.isolation == "thread":
            return None
        return Isolation(entry=ENTRY)

    def load(self, model: Model) -> PythonInstance:
        """The instance for a thread of the server. Raises `LoadError` with Triton's words."""
        description = describe(model)
        decoupled = is_decoupled(json.loads(description.config))
        runtime = Runtime(model.name, str(model.version), decoupled, model.services)
        modules = PrivateModules(description.file, runtime)
        with runtime.entered():
            model_class = modules.load_class(model.version)
        return instance_of(model_class, description, runtime, modules.close)


def describe(model: Model) -> Description:
    """What the instance ``model`` is told about itself. Raises `LoadError` if it has no ``model.py``."""
    config = json.dumps(to_json(model.config))
    return Description(
        model.name,
        model.version,
        model.path,
        model_file(model.path, config),
        config,
        model.instance_name,
        model.device.kind,
        model.device.id,
        model.services,
    )
