"""The files of a model: their kinds, and the check that none of them names files elsewhere.

OpenVINO detects formats by the content of a file, not only by its name. So every file is checked as ONNX is. Files that
it reads beside a file have fixed names in the same place: ``.bin``, ``.pdiparams``, the ``variables`` of a SavedModel,
whose ``assets`` are not read. Only ONNX names files, and a folder of PaddlePaddle without ``.pdmodel``, which is
refused. Core checks where links lead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace import LoadError, Model
from headrace_engines import check_onnx_references
from headrace_openvino.openvino_api import reword

#: Suffixes of files that are whole models, or have their weights beside them.
_ENDINGS = (".xml", ".onnx", ".pb", ".pdmodel", ".tflite")
_SAVED_MODEL = "saved_model.pb"
#: A part of the error for a graph that OpenVINO has read, and cannot convert as a whole. Only such a graph is then read
#: from memory, where OpenVINO never returns for a cycle of nodes; by path, it refuses a cycle.
_UNCONVERTED = "wasn't fully converted"
#: Marks a folder of PaddlePaddle, whose variables are files with any name.
_PADDLE = "__model__"


def read_model(core: Any, model: Model) -> Any:
    """Return the ``openvino.Model`` of the version's file; raises `LoadError` naming the file at fault."""
    path = model.file("model.xml")
    files = _files_of(model, path)
    beside = [] if path.is_dir() else check_onnx_references(path, model.path.parent)
    lead = f"unable to load model '{model.name}': '" + "', '".join(files) + "':"
    try:
        opened = core.read_model(*files)
    except Exception as error:  # pybind has its own exception classes
        is_unconverted = path.suffix == ".onnx" and not beside and _UNCONVERTED in str(error)
        opened = _read_bytes(core, path) if is_unconverted else None
        if opened is None:
            raise LoadError(f"{lead} {reword(error)}") from error
    if not opened.outputs:
        raise LoadError(f"{lead} it has no outputs")
    return opened


def _read_bytes(core: Any, path: Path) -> Any:
    """Return the ``openvino.Model`` of an ONNX file that OpenVINO cannot read by its path; None if it cannot at all.

    From memory, OpenVINO replaces unknown operators by their function bodies in ONNX.
    """
    try:
        return core.read_model(path.read_bytes())
    except Exception:  # pybind has its own exception classes
        return None


def _files_of(model: Model, path: Path) -> list[str]:
    """Return the files for OpenVINO: the model, and the weights of a ``.xml``. Raises `LoadError` for an unknown
    format."""
    lead = f"unable to load model '{model.name}'"
    if path.is_dir():
        if not (path / _SAVED_MODEL).is_file() or (path / _PADDLE).exists():
            raise LoadError(f"{lead}: '{path}' is a folder, but not a SavedModel, which has {_SAVED_MODEL} in it")
        return [str(path)]
    if path.suffix not in _ENDINGS:
        raise LoadError(
            f"{lead}: '{path}' is of no kind that is served here: the file's name ends in {', '.join(_ENDINGS)}, or it "
            "is the folder of a SavedModel"
        )
    if path.suffix != ".xml":
        return [str(path)]
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise LoadError(f"{lead}: no file '{weights}', the weights of '{path}'")
    return [str(path), str(model.resource(str(weights.relative_to(model.path))))]
