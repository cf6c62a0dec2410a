"""The entry points of a model's process: `load` to serve, `complete` to complete a config.

`headrace_processes.supervision.bootstrap` calls them in the model's interpreter, which has the standard library and
NumPy.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from headrace import InstanceSpec, LoadError
from headrace_python.instance import InstanceDescription, PythonInstance, instance_of, is_decoupled
from headrace_python.module import find_source, load_class
from headrace_python.outcomes import describe
from headrace_python.parameters import HOST_INPUTS
from headrace_python.process_title import show_as_stub
from triton_python_backend_utils import ModelConfig, dlpack
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.runtime import ModelPhase, Runtime


def load(spec: InstanceSpec) -> PythonInstance:
    """Return the initialized instance of ``spec``, the only model in this interpreter.

    Raises `LoadError` with Triton's words.
    """
    show_as_stub()
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
    decoupled = is_decoupled(json.loads(spec.config))
    runtime = Runtime(spec.name, str(spec.version), decoupled, spec.services, model_dir=spec.path)
    runtimes.use(runtime)
    with runtime.entered():
        model_class = load_class(description.file, description.version, description.folders)
    instance = instance_of(model_class, description, runtime, _forget)
    if spec.services is not None and spec.services.passes_device_tensors:
        dlpack.stays = instance.takes_device_tensors = True
        instance.inputs_on_host = spec.parameters.get(HOST_INPUTS, "yes") != "no"
    return instance


def _forget() -> None:
    runtimes.use(None)


def complete(*, exchange: int, starts: int) -> NoReturn:
    """Read the job from the descriptor ``exchange``, overwrite it with the answer, and exit.

    Writes a byte to ``starts`` when the model is imported. The answer is ``{"error": ...}`` or ``{"completed": ...}``,
    with null if the model has no ``auto_complete_config``.
    """
    with open(exchange, "r+b", closefd=False) as stream:
        stream.seek(0)
        order = json.load(stream)
        stream.seek(0)
        stream.truncate()
        stream.write(_answer(**order, starts=starts).encode())
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the model may have closed or replaced them
            output.flush()
    os._exit(0)  # even if threads of the model still run


def _answer(name: str, version: int, path: str, file: str, folders: list[str], config: str, starts: int) -> str:
    runtime = Runtime(name, str(version), services=None, phase=ModelPhase.COMPLETING, model_dir=path)
    runtimes.use(runtime)
    try:
        with runtime.entered():
            model_class = load_class(Path(file), version, [Path(folder) for folder in folders])
            with contextlib.suppress(OSError):  # the model has closed it: then all of its time counts as importing
                os.write(starts, b"1")
            return json.dumps({"completed": _completed(name, model_class, config)})
    except LoadError as error:
        return json.dumps({"error": error.message})
    except BaseException as error:  # the model's: SystemExit is its error, too
        return json.dumps({"error": describe(error, str(Path(file).parent.parent))})


def _completed(name: str, model_class: type[Any], config: str) -> dict[str, Any] | None:
    if not hasattr(model_class, "auto_complete_config"):
        return None
    returned = model_class.auto_complete_config(ModelConfig(config))
    if not isinstance(returned, ModelConfig):
        raise LoadError(f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object.")
    return returned.as_dict()
