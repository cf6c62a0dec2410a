"""Fields that name files: a config reads nothing outside its model's directory (docs/spec/security.md C2, C3).

Names are checked as written. `headrace.storage.local_storage` checks where links lead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.path_checks import one_line, why_path_leaves
from headrace.config.validation.shared import Problem
from headrace.errors import Code

_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Room:
    """The directory in which a file name must stay: ``levels`` above the one in which the name starts."""

    title: str
    levels: int = 0


_MODEL = _Room("the model directory")
_VERSION = _Room("the model directory", levels=1)
_WARMUP = _Room("the model's 'warmup' directory")
_STATE = _Room("the model's 'initial_state' directory")


def check(config: ModelConfig, files: Path | None) -> Iterator[Problem]:
    """Check every name of a file. If ``files``, the model's directory, is given, a batching library must exist."""
    for index, output in enumerate(config.output):
        if why_path_leaves(output.label_filename, _MODEL.levels):
            yield Problem(
                f"output[{index}].label_filename",
                f"label file path '{one_line(output.label_filename)}' for output '{output.name}' in model "
                f"'{config.name}' is outside model directory",
                Code.UNSUPPORTED,
            )
    for field, name, room in _named(config):
        reason = why_path_leaves(name, room.levels)
        if reason:
            yield Problem(
                field, f"{field} '{one_line(name)}' of model '{config.name}' must stay in {room.title}: {reason}"
            )
    yield from _check_runtime(config)
    yield from _check_strategy(config, files)


def _named(config: ModelConfig) -> Iterator[tuple[str, str, _Room]]:
    yield "default_model_filename", config.default_model_filename, _VERSION
    for key in sorted(config.cc_model_filenames):
        yield f"cc_model_filenames[{key!r}]", config.cc_model_filenames[key], _VERSION
    for index, library in enumerate(config.model_operations.op_library_filename):
        yield f"model_operations.op_library_filename[{index}]", library, _VERSION
    for index, sample in enumerate(config.model_warmup):
        for name in sorted(sample.inputs):
            field = f"model_warmup[{index}].inputs[{name!r}].input_data_file"
            yield field, sample.inputs[name].input_data_file, _WARMUP
    for index, state in enumerate(config.sequence_batching.state):
        for number, initial in enumerate(state.initial_state):
            field = f"sequence_batching.state[{index}].initial_state[{number}].data_file"
            yield field, initial.data_file, _STATE


def _is_inside(folder: Path, name: str) -> bool:
    """True if the file is in ``folder`` when all links are followed. It need not exist."""
    try:
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def _check_runtime(config: ModelConfig) -> Iterator[Problem]:
    """Check ``runtime``. Backends are not shared libraries here: only the name of the backend's own library, which old
    configs have, and a Python file are accepted."""
    name = config.runtime
    if why_path_leaves(name):
        yield Problem(
            "runtime",
            f"backend library name '{one_line(name)}' escapes backend directory, for model '{config.name}', check "
            "model config runtime field",
        )
    elif name and not name.endswith(".py") and name != f"libtriton_{config.backend}.so":
        yield Problem(
            "runtime",
            f"unable to find backend library '{one_line(name)}' for model '{config.name}': a runtime is a Python file "
            "of the backend's directory here, or empty",
        )


def _check_strategy(config: ModelConfig, files: Path | None) -> Iterator[Problem]:
    """Check the path of a custom batching library. It is the only path that may be absolute."""
    if _STRATEGY not in config.parameters:
        return
    field, name = f"parameters[{_STRATEGY!r}]", config.parameters[_STRATEGY].string_value
    escapes = "\0" in name or "\\" in name or ".." in name.split("/")
    if escapes or (files is not None and not _is_inside(files, name)):
        yield Problem(field, "Batching library path escapes model repository.")
    elif files is not None and not _is_file(files / name):
        yield Problem(field, f"Batching library path not found: {one_line(name)}")
    elif config.HasField("sequence_batching"):
        yield Problem(field, f"parameter '{_STRATEGY}' is not allowed with sequence batching for {config.name}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, the name is too long for the system
        return False
