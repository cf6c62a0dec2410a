"""TorchServe's ``.mar``: its manifest, its ``model-config.yaml``, and the model repository that serves it.

Source: ``MAR-INF/MANIFEST.json`` of torch-model-archiver; TorchServe's page on model-config.yaml. The archive itself is
not changed: the repository agent ``archive`` unpacks it at the load of the model.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from headrace_migrate.model_repository import WrittenModel, batching, check_name
from headrace_migrate.report import BadInput, Report, Verdict
from headrace_migrate.yaml_documents import documents, fields_of, text_of

_MANIFEST = "MAR-INF/MANIFEST.json"
_MAX_BYTES = 1 << 20
_PAGE = "docs/migrating.md#torchserve"
#: Handlers of TorchServe with a known input tensor, and their steps around the model.
_HANDLERS = {
    "image_classifier": ("3, 224, 224", "decodes, resizes, crops and normalizes images; softmax and the top 5 classes"),
}
_OTHER_HANDLERS = ("image_segmenter", "object_detector", "text_classifier", "base_handler")
#: Formats that describe their own tensors, and their backends.
_SELF_DESCRIBED = {".onnx": "onnxruntime", ".pt2": "pytorch"}
_DISTRIBUTIONS = {"onnxruntime": "headrace-onnx", "pytorch": "headrace-torch"}


def read_archive(path: Path, report: Report) -> WrittenModel | None:
    """Report on the archive ``path``. Return the model, or None if too little is known of it. Raises `BadInput`."""
    manifest, settings = _contents(path)
    model = manifest.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, str) for value in model.values()):
        raise BadInput(f"{path}: {_MANIFEST} has no object 'model' of strings")
    name, serialized = model.get("modelName", ""), model.get("serializedFile", "")
    check_name(name, path)
    report.add(0, "model", name, Verdict.AS_IT_IS, "", _PAGE)
    if not serialized:
        report.add(0, "file", "serializedFile", Verdict.NOT_THERE, "the model is in the code of its handler", _PAGE)
        return None
    report.need(0, "archive", path.name, "headrace-archive", "docs/repository-agents.md")
    suffix = PurePosixPath(serialized).suffix
    backend = _SELF_DESCRIBED.get(suffix, "pytorch")
    report.need(0, "file", serialized, _DISTRIBUTIONS[backend], "docs/backends.md")
    tensors = _read_handler(model.get("handler", ""), report) if suffix not in _SELF_DESCRIBED else ""
    if model.get("requirementsFile"):
        detail = "install these packages in the environment of the server"
        report.add(0, "file", model["requirementsFile"], Verdict.DIFFERS, detail, _PAGE)
    if tensors is None:
        return None
    runtime = 'runtime: "model.py"\n' if model.get("modelFile") else ""
    config = f'backend: "{backend}"\n{runtime}{_batching(settings, report)}\n{tensors}'
    agent = 'model_repository_agents { agents { name: "archive" } }\n'
    return WrittenModel(name, config + agent, [("model.mar", path)])


def _read_handler(handler: str, report: Report) -> str | None:
    """Return the inputs and outputs of ``handler``; None if it does not imply them."""
    known = _HANDLERS.get(handler.partition(":")[0])
    if known is None:
        what = "tensors of any shape" if handler in _OTHER_HANDLERS else "code for TorchServe's interface"
        detail = f"{what}: write inputs and outputs into config.pbtxt yourself, and send tensors"
        report.add(0, "handler", handler, Verdict.NOT_THERE, detail, _PAGE)
        return None
    detail = f"clients send the tensor. Not there: it {known[1]}"
    report.add(0, "handler", handler, Verdict.DIFFERS, detail, _PAGE)
    return (
        f'input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [{known[0]}] }}\n'
        'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [-1] }\n'
    )


def _batching(settings: Mapping[str, str], report: Report) -> str:
    """Return the lines of the config for ``model-config.yaml``, and report on its fields."""
    numbers = {"batchSize": 1, "maxBatchDelay": 0, "minWorkers": 1}
    for name, value in settings.items():
        if name in numbers and value.isascii() and value.isdigit() and len(value) < 7:
            numbers[name] = int(value)
            report.add(0, "setting", f"{name}: {value}", Verdict.CHANGED, "now in config.pbtxt", _PAGE)
        else:
            report.add(0, "setting", f"{name}: {value}", Verdict.DIFFERS, "not taken over", _PAGE)
    return batching(max(numbers["batchSize"], 1), 1000 * numbers["maxBatchDelay"], numbers["minWorkers"])


def _contents(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return the manifest, and the fields of the model's settings. Raises `BadInput`."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(_member(archive, _MANIFEST, path))
            if not isinstance(manifest, dict):
                raise BadInput(f"{path}: {_MANIFEST} is no JSON object")
            model = manifest.get("model")
            name = model.get("configFile", "") if isinstance(model, dict) else ""
            text = _member(archive, name, path).decode() if isinstance(name, str) and name else ""
    except KeyError as error:
        raise BadInput(f"{path}: {error.args[0]}: torch-model-archiver has not written it") from error
    except (OSError, zipfile.BadZipFile, zlib.error, struct.error, ValueError, RecursionError, EOFError,
            NotImplementedError, RuntimeError) as error:  # fmt: skip
        raise BadInput(f"{path}: no archive of TorchServe: {error}") from error
    roots = documents(text, f"{path}: {name}") if text.strip() else []
    return manifest, {key: text_of(value) for root in roots for key, value in fields_of(root).items()}


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    with archive.open(name) as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise BadInput(f"{path}: {name} has more than {_MAX_BYTES >> 20} MiB")
    return content
