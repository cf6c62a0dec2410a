"""The label files of a model's outputs. Source: docs/spec/behaviours.md section 3.4."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.path_checks import why_path_leaves
from headrace.config.regular_files import read_regular
from headrace.config.validation import Problem
from headrace.errors import HeadraceError, LoadError, Unsupported


def read_labels(config: ModelConfig, model_path: Path) -> dict[str, list[str]]:
    """Return the lines of each output's label file, blank lines kept.

    Raises `Unsupported` for a file outside the model directory, `LoadError` for an unreadable one.
    """
    return {
        io.name: _read(config.name, io.name, io.label_filename, model_path) for io in config.output if io.label_filename
    }


def check_labels(config: ModelConfig, model_path: Path) -> Iterator[Problem]:
    """Yield a problem for every file that `read_labels` cannot read, unless the rules for paths already refuse its
    name."""
    for index, io in enumerate(config.output):
        try:
            if io.label_filename and not why_path_leaves(io.label_filename):
                _read(config.name, io.name, io.label_filename, model_path)
        except HeadraceError as error:
            yield Problem(f"output[{index}].label_filename", error.message, error.code)


def _read(model: str, output: str, filename: str, model_path: Path) -> list[str]:
    path = model_path / posixpath.normpath(filename)  # resolves `..` before links are followed
    if why_path_leaves(filename):
        raise Unsupported(
            f"label file path '{filename}' for output '{output}' in model '{model}' is outside model directory"
        )
    try:
        lines = read_regular(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read label file '{path}' for output '{output}' of model '{model}': {error}") from error
    return lines if lines[-1] else lines[:-1]
