"""Finds and loads a model that is to be tested: its code, its config, and what stands for the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import LoadError
from headrace_python.description import Description, is_decoupled, model_file
from headrace_python.harness import PythonModel
from headrace_python.instance import instance_of
from headrace_python.offline import OfflineServices
from headrace_python.private import PrivateModules
from triton_python_backend_utils import ModelConfig
from triton_python_backend_utils.runtime import Phase, Runtime


def open_model(
    source: Path | type[Any],
    config: Mapping[str, Any] | None = None,
    parameters: Mapping[str, str] | None = None,
    models: Mapping[str, Callable[..., Any]] | None = None,
    auto_complete: bool = True,
    timeout_s: float = 10.0,
) -> PythonModel:
    """The model of ``source``: a ``model.py``, a directory with one, or a class. See `python_model`."""
    services = OfflineServices(models or {})
    file, folder, version = _located(source)
    whole = _config(folder, source.__name__ if isinstance(source, type) else "", config or {}, parameters or {})
    path = file.parent if file is not None else Path(folder, "1")
    runtime = Runtime(whole["name"], str(version), False, services, Phase.COMPLETING, str(path))
    modules = PrivateModules(file, runtime) if file is not None else None
    release = modules.close if modules is not None else _nothing
    with runtime.entered():
        model_class = modules.load_class(version) if modules is not None else source
        assert isinstance(model_class, type)
        if auto_complete and hasattr(model_class, "auto_complete_config"):
            whole = model_class.auto_complete_config(ModelConfig(json.dumps(whole))).as_dict()
    runtime.phase, runtime.decoupled = Phase.INITIALIZING, is_decoupled(whole)
    description = Description(
        whole["name"], version, path, file or path, json.dumps(whole), f"{whole['name']}_0_0", services=services
    )
    return PythonModel(instance_of(model_class, description, runtime, release), whole, services, timeout_s)


def _located(source: Path | type[Any]) -> tuple[Path | None, Path, int]:
    """``model.py`` of ``source``, the model's directory, and the version."""
    if isinstance(source, type):
        module = sys.modules.get(source.__module__)
        return None, Path(getattr(module, "__file__", None) or ".").parent, 1
    if source.is_file():
        return source, source.parent.parent, int(source.parent.name) if source.parent.name.isdecimal() else 1
    if source.name.isdecimal():
        return model_file(source, "{}"), source.parent, int(source.name)
    versions = [int(path.name) for path in source.iterdir() if path.name.isdecimal()]
    if not versions:
        raise LoadError(f"no version directory in '{source}'")
    config = json.dumps(_read(source))
    return model_file(source / str(max(versions)), config), source, max(versions)


def _config(folder: Path, name: str, given: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """The config file of ``folder``, if there is one, under ``given``."""
    config: dict[str, Any] = {"backend": "python", "max_batch_size": 0, "input": [], "output": []}
    config |= {} if name else _read(folder)
    config |= given
    config["name"] = config.get("name") or name or folder.name
    own = {key: {"string_value": value} for key, value in parameters.items()}
    config["parameters"] = {**config.get("parameters", {}), **own}
    return config


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.pbtxt"
    if not file.is_file():
        return {}
    from headrace.config.json_form import to_json
    from headrace.config.parse import read_config

    return to_json(read_config(file))


def _nothing() -> None:
    """A class under test keeps its module."""
