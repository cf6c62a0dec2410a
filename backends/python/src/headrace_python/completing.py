"""The short-lived process in which a model completes its config; see `headrace_python.completion`.

`headrace.workers.process.bootstrap` calls `complete`, in the interpreter of the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from headrace import LoadError
from headrace_python.module import load_class
from headrace_python.outcomes import describe
from triton_python_backend_utils import ModelConfig
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.runtime import ModelPhase, Runtime


def complete(*, exchange: int) -> NoReturn:
    """Read from the descriptor ``exchange`` what to do, write the answer in its place, and end.

    The answer is ``{"completed": ...}``, null if the model has no ``auto_complete_config``, or
    ``{"error": ...}``.
    """
    with open(exchange, "r+b", closefd=False) as stream:
        stream.seek(0)
        order = json.load(stream)
        stream.seek(0)
        stream.truncate()
        stream.write(_answer(**order).encode())
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the model may have closed or replaced them
            output.flush()
    os._exit(0)  # whatever threads the model has started


def _answer(name: str, version: int, path: str, file: str, folders: list[str], config: str) -> str:
    runtime = Runtime(name, str(version), services=None, phase=ModelPhase.COMPLETING, model_dir=path)
    runtimes.use(runtime)
    try:
        with runtime.entered():
            model_class = load_class(Path(file), version, [Path(folder) for folder in folders])
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
