"""Completes a config by the model's ``auto_complete_config``, in a process that exits afterwards.

Source: docs/spec/behaviours.md sections 9.1 and 9.2. The model's code cannot affect the server.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, get_args

from google.protobuf.json_format import ParseDict, ParseError

from headrace import LoadError, Model, ModelConfig, available_cores, child_command, config_to_json, ending
from headrace_python.class_source import may_complete
from headrace_python.environment import PACKAGES
from headrace_python.program import StartTimeout, run

#: The fields that ``auto_complete_config`` may change. As in Triton, its other fields are not read.
Completed: TypeAlias = Literal[
    "max_batch_size", "input", "output", "dynamic_batching", "sequence_batching", "model_transaction_policy"
]
_COMPLETED: tuple[Completed, ...] = get_args(Completed)
#: The most bytes of a returned config.
MAX_BYTES = 16 << 20
#: Limits the processes to one per core: each uses a core to import its model.
_STARTS = threading.BoundedSemaphore(available_cores())


def complete(
    model: Model,
    file: Path,
    folders: Sequence[Path] = (),
    python: Path | str = sys.executable,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    import_timeout_s: float = 600.0,
) -> None:
    """Complete ``model.config``, in place, by ``auto_complete_config`` of the class in ``file``.

    Starts no process if the source shows that the class has no such method (Triton imports each model once more).

    - ``folders``: those of `headrace_python.module.load_class`.
    - ``python``: the interpreter. ``environ`` is added to the variables of the server.
    - ``import_timeout_s``: the limit to import the file.
    - ``timeout_s``: the limit of the method, and of the wait for a core that no other completion uses.

    Raises `LoadError` with Triton's words or the model's traceback. The config is unchanged then.
    """
    if not may_complete(file):
        return
    order = {
        "name": model.name,
        "version": model.version,
        "path": str(model.path),
        "file": str(file),
        "folders": [str(folder) for folder in folders],
        "config": json.dumps(config_to_json(model.config)),
    }
    with tempfile.TemporaryFile() as exchange:
        exchange.write(json.dumps(order).encode())
        exchange.flush()
        with _start_slot(timeout_s):
            code = _run(model.name, str(python), environ or {}, timeout_s, import_timeout_s, exchange)
        found = _read(model.name, exchange, code)
    if found is not None:
        _merge(found, model)


@contextmanager
def _start_slot(timeout_s: float) -> Iterator[None]:
    """Hold one of `_STARTS`. After ``timeout_s`` go on without it, so that imports that hang do not block others."""
    acquired = _STARTS.acquire(timeout=timeout_s)
    try:
        yield
    finally:
        if acquired:
            _STARTS.release()


def _run(
    name: str, python: str, environ: Mapping[str, str], timeout_s: float, import_timeout_s: float, exchange: IO[bytes]
) -> int:
    called, entry = f"{name}_autocomplete", "headrace_python.entries:complete"
    started, starts = os.pipe()
    try:
        interpreter, *rest = child_command(python, entry, called, PACKAGES, exchange=exchange.fileno(), starts=starts)
        return run(
            [interpreter, "-X", "faulthandler", *rest],
            timeout_s,
            environ={"PYTHONUNBUFFERED": "1", **environ},
            pass_fds=(exchange.fileno(), starts),
            started=started,
            start_timeout_s=import_timeout_s,
        )
    except StartTimeout:
        problem = f"the file of model '{name}' was not imported within {import_timeout_s:g} s"
        setting = "parameter 'load_timeout_seconds', or load-timeout-seconds of --backend-config=python"
        raise LoadError(f"{problem} ({setting})") from None
    except TimeoutError:
        problem = f"auto_complete_config of model '{name}' did not return within {timeout_s:g} s"
        raise LoadError(f"{problem} (stub-timeout-seconds of --backend-config=python)") from None
    except OSError as error:
        raise LoadError(f"cannot run the interpreter '{python}' of model '{name}': {error.strerror}") from error
    finally:
        os.close(started)
        os.close(starts)


def _read(name: str, exchange: IO[bytes], code: int) -> dict[str, Any] | None:
    """Return the config in ``exchange``; None if the model completes nothing."""
    exchange.seek(0)
    text = exchange.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise LoadError(f"auto_complete_config of model '{name}' returned a config of more than {MAX_BYTES} bytes")
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        found = {}
    if "error" in found:
        raise LoadError(found["error"])
    if "completed" not in found:  # it ended before it wrote
        raise LoadError(f"the process of auto_complete_config of model '{name}' {ending(code)}")
    completed: dict[str, Any] | None = found["completed"]
    return completed


def _merge(found: Mapping[str, Any], model: Model) -> None:
    """Copy the fields that may be completed. Fields that ``found`` lacks are cleared."""
    try:
        completed = ParseDict({key: found[key] for key in _COMPLETED if key in found}, ModelConfig())
    except ParseError as error:
        raise LoadError(f"auto_complete_config of model '{model.name}' returned no valid config: {error}") from error
    for key in _COMPLETED:
        model.config.ClearField(key)
    model.config.MergeFrom(completed)
