"""Fields that name files: a config reads nothing outside its model's directory (security: C2, C3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.validation.problem import Problem
from penstock.errors import Code

_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Named:
    """``name`` stands in ``field`` and is looked up in ``folder``, a directory of the model's.

    An empty ``folder`` is the model's directory; None is one of its versions, where ``..`` is
    still the model's.
    """

    field: str
    name: str
    folder: str | None = ""
    room: str = "the model directory"


def check(config: ModelConfig, files: Path | None) -> Iterator[Problem]:
    """Every name of a file; symbolic links are followed if ``files``, the model's directory, is given."""
    for index, output in enumerate(config.output):
        reason = _reason(_Named(f"output[{index}].label_filename", output.label_filename), files)
        if reason:
            yield Problem(
                f"output[{index}].label_filename",
                f"label file path '{output.label_filename}' for output '{output.name}' in model '{config.name}' is "
                "outside model directory",
                Code.UNSUPPORTED,
            )
    for named in _named(config):
        reason = _reason(named, files)
        if reason:
            yield Problem(
                named.field,
                f"{named.field} '{_printed(named.name)}' of model '{config.name}' must stay in {named.room}: {reason}",
            )
    yield from _check_strategy(config, files)


def _named(config: ModelConfig) -> Iterator[_Named]:
    yield _Named("default_model_filename", config.default_model_filename, None)
    yield _Named("runtime", config.runtime, None, "the backend directory")
    for key in sorted(config.cc_model_filenames):
        yield _Named(f"cc_model_filenames[{key!r}]", config.cc_model_filenames[key], None)
    for index, library in enumerate(config.model_operations.op_library_filename):
        yield _Named(f"model_operations.op_library_filename[{index}]", library, None)
    for index, sample in enumerate(config.model_warmup):
        for name in sorted(sample.inputs):
            field = f"model_warmup[{index}].inputs[{name!r}].input_data_file"
            yield _Named(field, sample.inputs[name].input_data_file, "warmup", "the model's 'warmup' directory")
    for index, state in enumerate(config.sequence_batching.state):
        for number, initial in enumerate(state.initial_state):
            field = f"sequence_batching.state[{index}].initial_state[{number}].data_file"
            yield _Named(field, initial.data_file, "initial_state", "the model's 'initial_state' directory")


def _reason(named: _Named, files: Path | None) -> str:
    """Why ``named`` leaves its room; empty if it does not."""
    name = named.name
    if "\0" in name:
        return "it contains NUL"
    if "\\" in name:
        return "it contains a backslash"
    if name.startswith("/"):
        return "it is absolute"
    if _climbs(name, allowed=int(named.folder is None and named.field != "runtime")):
        return "it climbs out with '..'"
    if files is not None and named.folder is not None and name and not _is_inside(files / named.folder, name):
        return "it is a link that leads out"
    return ""


def _climbs(name: str, allowed: int) -> bool:
    """Whether ``name`` passes more than ``allowed`` directories above the one it starts in."""
    depth = allowed
    for part in name.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return True
    return False


def _is_inside(folder: Path, name: str) -> bool:
    """Whether the file, which need not exist, is in ``folder`` with all links followed."""
    try:
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links, or a name too long for the system
        return False


def _check_strategy(config: ModelConfig, files: Path | None) -> Iterator[Problem]:
    """A library of the author's own that says when a batch is full; the one path that may be absolute."""
    if _STRATEGY not in config.parameters:
        return
    field, name = f"parameters['{_STRATEGY}']", config.parameters[_STRATEGY].string_value
    escapes = "\0" in name or "\\" in name or ".." in name.split("/")
    if escapes or (files is not None and not _is_inside(files, name)):
        yield Problem(field, "Batching library path escapes model repository.")
    elif files is not None and not (files / name).is_file():
        yield Problem(field, f"Batching library path not found: {name}")
    elif config.HasField("sequence_batching"):
        yield Problem(field, f"parameter '{_STRATEGY}' is not allowed with sequence batching for {config.name}")


def _printed(name: str) -> str:
    """``name`` with control characters written out, so that it stays one line in a log."""
    return name.encode("unicode_escape").decode() if not name.isprintable() else name
