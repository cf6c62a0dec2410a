"""How a process of its own gets the instance of a Python model."""

from __future__ import annotations

import json
from pathlib import Path

from headrace import InstanceSpec
from headrace_python.instance import PythonInstance, instance_of
from headrace_python.instance_description import InstanceDescription, is_decoupled
from headrace_python.model_source import find_source
from headrace_python.module import load_class
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.runtime import Runtime


def load(spec: InstanceSpec) -> PythonInstance:
    """The instance that ``spec`` describes, initialized. Raises `LoadError` with Triton's words."""
    path = Path(spec.path)
    source = find_source(path, spec.config, spec.options)
    description = InstanceDescription(
        spec.name,
        spec.version,
        path,
        source.file,
        spec.config,
        spec.instance_name,
        spec.device_kind,
        spec.device_id,
        spec.services,
        source.folders,
    )
    return alone(description)


def alone(description: InstanceDescription) -> PythonInstance:
    """The instance of the only model in this interpreter."""
    decoupled = is_decoupled(json.loads(description.config))
    runtime = Runtime(
        description.name, str(description.version), decoupled, description.services, model_dir=str(description.path)
    )
    runtimes.use(runtime)
    with runtime.entered():
        model_class = load_class(description.file, description.version, description.folders)
    return instance_of(model_class, description, runtime, _forget)


def _forget() -> None:
    runtimes.use(None)
