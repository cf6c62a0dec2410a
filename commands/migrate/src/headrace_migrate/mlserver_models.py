"""MLServer's ``model-settings.json`` and ``settings.json``, and the model repository that serves the same.

Source: MLServer's reference of model settings; its runtime for scikit-learn. Models of scikit-learn become Python
models that load the same file with joblib.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_migrate.model_repository import WrittenModel, batching, check_name
from headrace_migrate.report import BadInput, Report, Verdict
from headrace_migrate.sources import read_text

SETTINGS = "model-settings.json"
_SERVER_SETTINGS = "settings.json"
_PAGE = "docs/migrating.md#mlserver"
_SKLEARN = "mlserver_sklearn.SKLearnModel"
#: The default file names of MLServer for a model of scikit-learn.
_WELL_KNOWN = ("model.joblib", "model.pickle", "model.pkl")
_MAX_ROWS, _LONGEST_DELAY_S, _MAX_INSTANCES = 1_000_000, 3600, 1024
_MODULES = {"mlserver_xgboost", "mlserver_lightgbm", "mlserver_catboost"}
_FLAGS = {"http_port": "http-port", "grpc_port": "grpc-port", "metrics_port": "metrics-port", "host": "http-address"}
_MODEL = '''"""Serves a model of scikit-learn as MLServer does: written by headrace migrate."""

from pathlib import Path

import joblib
import numpy as np
import triton_python_backend_utils as pb_utils

FILE = Path(__file__).with_name({file!r})
OUTPUTS = ("predict", "predict_proba")
KINDS = {{"float32": "FP32", "float64": "FP64"}}


def run(model, output, rows):
    values = np.asarray(getattr(model, output)(rows))
    return values.reshape(-1, 1) if values.ndim == 1 else values


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        model = joblib.load(FILE)
        columns = model.n_features_in_
        config.add_input({{"name": "{name}", "data_type": "TYPE_{datatype}", "dims": [columns]}})
        rows = np.zeros((1, columns), pb_utils.triton_string_to_numpy("TYPE_{datatype}"))
        for output in OUTPUTS:
            if hasattr(model, output):
                values = run(model, output, rows)
                dtype = values.dtype
                kind = "STRING" if dtype.kind in "OUS" else KINDS.get(dtype.name, dtype.name.upper())
                config.add_output({{"name": output, "data_type": f"TYPE_{{kind}}", "dims": list(values.shape[1:])}})
        config.set_max_batch_size({rows})
        return config

    def initialize(self, args):
        self.model = joblib.load(FILE)

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "{name}").as_numpy()
        tensors = []
        for output in request.requested_output_names():
            values = run(self.model, output, rows)
            values = values.astype(object) if values.dtype.kind in "US" else values
            tensors.append(pb_utils.Tensor(output, values))
        return pb_utils.InferenceResponse(tensors)
'''


def read_directory(path: Path, report: Report) -> list[WrittenModel]:
    """Report on the models in ``path`` and in the directories in it. Return those that can be served.

    Raises `BadInput`.
    """
    models = list[WrittenModel]()
    for file in sorted([*path.glob(SETTINGS), *path.glob(f"*/{SETTINGS}")]):
        model = _read_model(file, _json(file), report)
        models += [model] if model is not None else []
    if (path / _SERVER_SETTINGS).is_file():
        _read_server(_json(path / _SERVER_SETTINGS), report)
    return models


def _json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(read_text(str(path)))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadInput(f"{path}: expected a JSON object")
    return document


def _read_model(file: Path, settings: Mapping[str, Any], report: Report) -> WrittenModel | None:
    name, implementation = settings.get("name") or file.parent.name, settings.get("implementation", "")
    if not (isinstance(name, str) and isinstance(implementation, str)):
        raise BadInput(f"{file}: 'name' and 'implementation' are strings")
    check_name(name, file)
    report.add(0, "model", name, Verdict.AS_IT_IS, "", _PAGE)
    if implementation != _SKLEARN:
        _refuse_runtime(implementation, report)
        return None
    report.need(0, "runtime", implementation, "headrace-python", "docs/python-models.md")
    report.add(0, "packages", "scikit-learn, joblib", Verdict.NEEDS, "install the versions that made the model", _PAGE)
    artifact = _artifact(file, settings, report)
    if artifact is None:
        return None
    inputs = settings.get("inputs") or [{}]
    first = inputs[0] if isinstance(inputs, list) and isinstance(inputs[0], dict) else {}
    tensor, datatype = str(first.get("name", "predict")), str(first.get("datatype", "FP32"))
    if not tensor.isidentifier() and not tensor.replace("-", "_").isidentifier():
        raise BadInput(f"{file}: '{tensor}' is no name of an input")
    if datatype not in ("FP32", "FP64", "INT32", "INT64"):
        report.add(0, "input", f"{tensor}: {datatype}", Verdict.NOT_THERE, "no datatype of numbers", _PAGE)
        return None
    detail = "the only name and datatype of the input; without 'outputs' in a request, all outputs are in the answer"
    report.add(0, "input", f"{tensor}: {datatype}", Verdict.DIFFERS, detail, _PAGE)
    size = settings.get("max_batch_size", 0)
    delay, workers = settings.get("max_batch_time", 0), settings.get("parallel_workers") or 1
    for setting, value, limit in (
        ("max_batch_size", size, _MAX_ROWS),
        ("max_batch_time", delay, _LONGEST_DELAY_S),
        ("parallel_workers", workers, _MAX_INSTANCES),
    ):
        kinds = int | float if setting == "max_batch_time" else int
        if not (isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= limit):
            raise BadInput(f"{file}: '{setting}' is {value!r}, expected a number from 0 to {limit}")
    rows = max(size, 64)
    config = f'backend: "python"\n{batching(rows, int(delay * 1e6) if size > 1 else 0, workers)}\n'
    code = _MODEL.format(file=artifact.name, name=tensor, datatype=datatype, rows=rows)
    return WrittenModel(name, config, [("1/model.py", code), (f"1/{artifact.name}", artifact)])


def _artifact(file: Path, settings: Mapping[str, Any], report: Report) -> Path | None:
    """Return the file of the model, as MLServer finds it; None if it is not on this machine."""
    parameters = settings.get("parameters") or {}
    uri = parameters.get("uri", "") if isinstance(parameters, dict) else ""
    path = file.parent / str(uri)
    candidates = [path / known for known in _WELL_KNOWN] if path.is_dir() else [path]
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        report.add(0, "file", str(uri) or _WELL_KNOWN[0], Verdict.NOT_THERE, "not on this machine", _PAGE)
    return found


def _refuse_runtime(implementation: str, report: Report) -> None:
    module = implementation.partition(".")[0]
    if module in _MODULES:
        detail = "no backend for trees: convert the model to ONNX by onnxmltools, and serve it by headrace-onnx"
    elif module.startswith("mlserver"):
        detail = "no runtime does the same: write a Python model"
    else:
        detail = "code for MLServer's interface: write its predict as execute of a Python model"
    report.add(0, "runtime", implementation, Verdict.NOT_THERE, detail, "docs/python-models.md")


def _read_server(settings: Mapping[str, Any], report: Report) -> None:
    for name, value in settings.items():
        if name in _FLAGS:
            report.add(
                0, "setting", f"{name}: {value}", Verdict.CHANGED, f"now --{_FLAGS[name]}={value}", "docs/flags.md"
            )
        elif name == "parallel_workers":
            detail = "processes of each model: instance_group in config.pbtxt"
            report.add(0, "setting", f"{name}: {value}", Verdict.DIFFERS, detail, "docs/isolation.md")
        else:
            report.add(0, "setting", f"{name}: {value}", Verdict.DIFFERS, "not taken over", _PAGE)
