"""Complete a config by its backend in a process of its own, so that the server survives a crash of the engine.

For models whose instances have processes of their own. The process writes its result and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from headrace.backends.base import Backend, Isolation, Model
from headrace.errors import Code, ConfigError, HeadraceError, LoadError, summary
from headrace_processes.supervision.child_process import ChildProcess, child_command, folders_of, run_child
from headrace_processes.supervision.exits import ending, read_crash_report
from headrace_processes.supervision.orphan_reaper import ORPHAN_REAPER

if TYPE_CHECKING:
    from headrace.config.model_config_pb2 import ModelConfig

_Completed: TypeAlias = Literal[
    "max_batch_size", "input", "output", "dynamic_batching", "sequence_batching", "model_transaction_policy"
]
#: The fields that `Backend.complete_config` may change.
_COMPLETED: tuple[_Completed, ...] = get_args(_Completed)
#: At most this much of a result is read. A config is smaller.
_MAX_BYTES = 16 << 20


def complete_in_process(backend: Backend, model: Model, isolation: Isolation) -> None:
    """Call ``backend.complete_config(model)`` in a process with the limits of ``isolation``. Blocks.

    Raises the `ConfigError` or `LoadError` of that call. Raises `LoadError` if the process exits early or exceeds its
    time.
    """
    task = {
        "backend": f"{type(backend).__module__}:{type(backend).__qualname__}",
        "options": dict(backend.options),
        "name": model.name,
        "version": model.version,
        "path": str(model.path),
        "config": model.config.SerializeToString().hex(),
        "is_sent": model.is_sent,
    }
    with tempfile.TemporaryFile() as shared_file, tempfile.TemporaryFile() as crash_file:
        shared_file.write(json.dumps(task).encode())
        shared_file.flush()
        result = _read_result(model.name, shared_file, _run_process(model.name, isolation, shared_file, crash_file))
    if "config" in result:
        _merge(result["config"], model.config)
        return
    message, code = str(result["message"]), Code(result["code"])
    raise ConfigError(message, code, field=result["field"]) if "field" in result else LoadError(message, code)


def _merge(result: str, config: ModelConfig) -> None:
    """Copy only the fields in `_COMPLETED` into ``config``: the engine may have damaged the others."""
    completed: Any = type(config).FromString(bytes.fromhex(result))
    for field, _ in completed.ListFields():
        if field.name not in _COMPLETED:
            completed.ClearField(field.name)
    for name in _COMPLETED:
        config.ClearField(name)
    config.MergeFrom(completed)


def _run_process(name: str, isolation: Isolation, shared_file: IO[bytes], crash_file: IO[bytes]) -> str:
    """Run the process. Return how it ended, as the end of a sentence "the process ..."."""
    fds = {"shared_file": shared_file.fileno(), "crash_file": crash_file.fileno()}
    entry, timeout_s = f"{__name__}:run_task", isolation.start_timeout_s + isolation.load_timeout_s
    try:
        command = child_command(
            sys.executable, entry, f"{name}_completion", (), memory_bytes=isolation.memory_bytes, **fds
        )
        process = run_child(command, fds.values(), isolation.environ)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name
        raise LoadError(f"cannot run a process to complete the config of model '{name}': {error}") from error
    ORPHAN_REAPER.watch(process.pid)
    child = ChildProcess(process, crash_file, folders_of(()))
    is_late = threading.Event()

    def kill_late() -> None:
        is_late.set()
        child.kill()

    timer = threading.Timer(timeout_s, kill_late)
    timer.daemon = True
    timer.start()
    code = child.wait()
    timer.cancel()
    exit_text = f"was not over within {timeout_s:g} s" if is_late.is_set() else ending(code)
    return f"{exit_text}\n{read_crash_report(child)}".rstrip()


def _read_result(name: str, shared_file: IO[bytes], exit_text: str) -> dict[str, Any]:
    shared_file.seek(0)
    text = shared_file.read(_MAX_BYTES)
    with contextlib.suppress(ValueError):
        result: dict[str, Any] = json.loads(text)
        if "backend" not in result:  # otherwise the file still has the task
            return result
    raise LoadError(f"the process in which the config of model '{name}' was being completed {exit_text}")


# ---------------------------------------------------------------------- in the process


def run_task(*, shared_file: int, crash_file: int, memory_bytes: int) -> NoReturn:
    """Read the task from the descriptor ``shared_file``, overwrite it with the result, and exit."""
    faulthandler.enable(crash_file)
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with open(shared_file, "r+b", closefd=False) as stream:
        stream.seek(0)  # both processes share one position
        task = json.load(stream)
        result = json.dumps(_complete(**task)).encode()
        stream.seek(0)
        stream.truncate()
        stream.write(result)
    os._exit(0)  # even if the engine has started threads


def _complete(
    backend: str, options: dict[str, str], name: str, version: int, path: str, config: str, is_sent: bool
) -> dict[str, Any]:
    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.config.parameters import parse_parameters

    module, _, kind = backend.partition(":")
    parsed = ModelConfig.FromString(bytes.fromhex(config))
    backend_object: Backend = getattr(import_module(module), kind)(options)
    try:
        parameters: Any = parse_parameters(backend_object.Parameters, parsed.parameters)
    except ConfigError:  # reported when the completed config is checked
        parameters = parse_parameters(backend_object.Parameters, {})
    try:
        backend_object.complete_config(Model(name, version, Path(path), parsed, parameters, is_sent=is_sent))
    except ConfigError as error:
        return {"message": error.message, "code": error.code.value, "field": error.field}
    except HeadraceError as error:
        return {"message": error.message, "code": error.code.value}
    except BaseException as error:  # SystemExit of a plugin is its error, too
        text = f"backend '{backend_object.name}' failed to complete the config of '{name}': {summary(error)}"
        return {"message": text, "code": Code.INTERNAL.value}
    return {"config": parsed.SerializeToString().hex()}
