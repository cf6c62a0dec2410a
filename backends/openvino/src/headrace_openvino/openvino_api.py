"""Import OpenVINO when the first model needs it, and reword its errors."""

from __future__ import annotations

import sys
from typing import Any

from headrace import LoadError, Model, in_memory, one_line
from headrace_engines import read_libraries

#: The prefixes of lines of an error that name OpenVINO's own source.
_PLACES = ("Exception from ", "Check '")


def load_engine() -> Any:
    """Return the module ``openvino``. Raises `LoadError` with the command that installs it.

    Its import would start telemetry: a fork of the server that sends data to the vendor, and files in the home
    directory. So the package of the telemetry is made unimportable first.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None makes a module unimportable
    read_libraries("openvino", "", "libs")
    try:
        import openvino
    except ImportError as error:
        raise LoadError(
            "backend 'openvino' needs the package openvino, which cannot be imported "
            f"({one_line(str(error))}); run: pip install openvino"
        ) from error
    return openvino


def open_core(model: Model) -> Any:
    """Return an ``openvino.Core`` for ``model`` alone, with the operators of the model.

    Raises `LoadError` with the library that cannot be loaded, and `ConfigError` for one that came with a load request.
    """
    core = load_engine().Core()
    # If a mapped file is shortened while the model is served, the process ends.
    core.set_property({"ENABLE_MMAP": False})
    if model.parameters.cpu_extension_path:
        _add_extension(core, model)
    return core


def _add_extension(core: Any, model: Model) -> None:
    """Add native code from the version's directory or the model's, which the owner of the repository wrote there."""
    name = model.parameters.cpu_extension_path
    model.refuse_if_sent("parameter 'CPU_EXTENSION_PATH'")
    path = model.resource_or_above(name)
    try:
        with in_memory(path):  # the dynamic loader reads it under the interpreter's lock
            core.add_extension(str(path))
    except Exception as error:  # pybind has its own exception classes
        raise LoadError(f"unable to load model '{model.name}': '{path}': {reword(error)}") from error


def reword(error: BaseException) -> str:
    """Return the text of an OpenVINO error, without the lines about its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = [line for line in lines if line and not line.startswith(_PLACES)]
    return one_line(" ".join(message) or type(error).__name__)
