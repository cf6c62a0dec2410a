"""Complete a config by its backend in a process of its own, so that the server survives a crash of the engine.

For models whose instances have processes of their own. The process ends with its answer.
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
#: What `Backend.complete_config` may change.
_COMPLETED: tuple[_Completed, ...] = get_args(_Completed)
#: A config is smaller.
_MOST_BYTES = 16 << 20


def complete_apart(backend: Backend, model: Model, isolation: Isolation) -> None:
    """Call ``backend.complete_config(model)`` in a process with the limits of ``isolation``. Blocks.

    Raises the `ConfigError` or `LoadError` of that call. Raises `LoadError` if the process exits early or exceeds its
    time.
    """
    order = {
        "backend": f"{type(backend).__module__}:{type(backend).__qualname__}",
        "options": dict(backend.options),
        "name": model.name,
        "version": model.version,
        "path": str(model.path),
        "config": model.config.SerializeToString().hex(),
        "is_sent": model.is_sent,
    }
    with tempfile.TemporaryFile() as exchange, tempfile.TemporaryFile() as crash_file:
        exchange.write(json.dumps(order).encode())
        exchange.flush()
        found = _read(model.name, exchange, _run(model.name, isolation, exchange, crash_file))
    if "config" in found:
        _merge(found["config"], model.config)
        return
    message, code = str(found["message"]), Code(found["code"])
    raise ConfigError(message, code, field=found["field"]) if "field" in found else LoadError(message, code)


def _merge(found: str, config: ModelConfig) -> None:
    """Copy into ``config`` only what a backend may complete: the engine may have damaged the process."""
    completed: Any = type(config).FromString(bytes.fromhex(found))
    for field, _ in completed.ListFields():
        if field.name not in _COMPLETED:
            completed.ClearField(field.name)
    for name in _COMPLETED:
        config.ClearField(name)
    config.MergeFrom(completed)


def _run(name: str, isolation: Isolation, exchange: IO[bytes], crash_file: IO[bytes]) -> str:
    """Run the process. Return how it ended, to complete the sentence "the process ..."."""
    fds = {"exchange": exchange.fileno(), "crash_file": crash_file.fileno()}
    entry, timeout_s = f"{__name__}:answer", isolation.start_timeout_s + isolation.load_timeout_s
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

    def end_it() -> None:
        is_late.set()
        child.kill()

    timer = threading.Timer(timeout_s, end_it)
    timer.daemon = True
    timer.start()
    code = child.wait()
    timer.cancel()
    how = f"was not over within {timeout_s:g} s" if is_late.is_set() else ending(code)
    return f"{how}\n{read_crash_report(child)}".rstrip()


def _read(name: str, exchange: IO[bytes], how: str) -> dict[str, Any]:
    exchange.seek(0)
    text = exchange.read(_MOST_BYTES)
    with contextlib.suppress(ValueError):
        found: dict[str, Any] = json.loads(text)
        if "backend" not in found:  # else the file still has the order
            return found
    raise LoadError(f"the process in which the config of model '{name}' was being completed {how}")


# ---------------------------------------------------------------------- in the process


def answer(*, exchange: int, crash_file: int, memory_bytes: int) -> NoReturn:
    """Read the order from the descriptor ``exchange``, overwrite it with the answer, and end the process."""
    faulthandler.enable(crash_file)
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with open(exchange, "r+b", closefd=False) as stream:
        stream.seek(0)  # both processes share one position
        order = json.load(stream)
        found = json.dumps(_complete(**order)).encode()
        stream.seek(0)
        stream.truncate()
        stream.write(found)
    os._exit(0)  # even if the engine has started threads


def _complete(
    backend: str, options: dict[str, str], name: str, version: int, path: str, config: str, is_sent: bool
) -> dict[str, Any]:
    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.config.parameters import parse_parameters

    module, _, kind = backend.partition(":")
    parsed = ModelConfig.FromString(bytes.fromhex(config))
    made: Backend = getattr(import_module(module), kind)(options)
    try:
        parameters: Any = parse_parameters(made.Parameters, parsed.parameters)
    except ConfigError:  # reported when the completed config is checked
        parameters = parse_parameters(made.Parameters, {})
    try:
        made.complete_config(Model(name, version, Path(path), parsed, parameters, is_sent=is_sent))
    except ConfigError as error:
        return {"message": error.message, "code": error.code.value, "field": error.field}
    except HeadraceError as error:
        return {"message": error.message, "code": error.code.value}
    except BaseException as error:  # SystemExit of a plugin is its error, too
        text = f"backend '{made.name}' failed to complete the config of '{name}': {summary(error)}"
        return {"message": text, "code": Code.INTERNAL.value}
    return {"config": parsed.SerializeToString().hex()}
