"""TorchServe's archives: what ``torch-model-archiver`` 0.12 writes, and what becomes of each file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace_archive import Archive
from tests.agents.archive.packing import items_of, zipped
from tests.agents.loading import Loader, files_of


def mar(files: Mapping[str, bytes], **model: object) -> bytes:
    """Return a ``.mar`` with the manifest that torch-model-archiver writes."""
    manifest = {
        "createdOn": "26/11/2026 02:00:00",
        "runtime": "python",
        "model": {"modelName": "mnist", "modelVersion": "1.0", **model},
        "archiverVersion": "0.12.0",
    }
    return zipped(items_of({**files, "MAR-INF/MANIFEST.json": json.dumps(manifest, indent=2).encode()}))


def load(content: bytes, tmp_path: Path, **parameters: str) -> dict[str, bytes] | str:
    """Return the files of the model, without its config; or the error."""
    made = Loader(Archive, tmp_path)({"mnist.mar": content, "config.pbtxt": b"config"}, **parameters)
    if isinstance(made, str):
        return made
    found = files_of(made)
    assert found.pop("config.pbtxt") == b"config"
    return found


def test_an_eager_model_is_a_module_and_its_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    files = {
        "mnist.py": b"class", "mnist_cnn.pt": b"weights", "mnist_handler.py": b"handler", "requirements.txt": b"timm",
        "model-config.yaml": b"batchSize: 4", "index_to_name.json": b"{}", "layers.py": b"layers",
    }  # fmt: skip
    content = mar(
        files,
        serializedFile="mnist_cnn.pt",
        modelFile="mnist.py",
        handler="mnist_handler.py",
        requirementsFile="requirements.txt",
        configFile="model-config.yaml",
    )
    assert load(content, tmp_path) == {
        "1/model.py": b"class", "1/model.pt": b"weights", "1/index_to_name.json": b"{}", "1/layers.py": b"layers",
    }  # fmt: skip
    who = "agent 'archive' of model 'm': "
    assert [record.getMessage().removeprefix(who) for record in caplog.records] == [
        "'mnist_cnn.pt' is '1/model.pt'",
        "'mnist.py' is '1/model.py'",
        "'MAR-INF/MANIFEST.json' is left out: it was read",
        "'mnist_handler.py' is left out: the handler is TorchServe's: clients send the tensors of the model",
        "'requirements.txt' is left out: nothing is installed: the environment of the server must have these packages",
        "'model-config.yaml' is left out: settings of TorchServe: set batching and instances in config.pbtxt",
        "'index_to_name.json' is '1/index_to_name.json', as it is",
        "'layers.py' is '1/layers.py', as it is",
    ]


@pytest.mark.parametrize(
    ("serialized", "name"),
    [("a.pt", "model.pt"), ("a.pth", "model.pt"), ("a.onnx", "model.onnx"), ("a.pt2", "model.pt2")],
)
def test_a_serialized_model_has_the_name_that_its_backend_reads(tmp_path: Path, serialized: str, name: str) -> None:
    content = mar({serialized: b"m"}, serializedFile=serialized, handler="image_classifier")
    assert load(content, tmp_path, into="7") == {f"7/{name}": b"m"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (mar({"h.py": b""}, handler="h.py"), "names no serializedFile: the model is in its handler"),
        (mar({"h.py": b""}, serializedFile="a.pt"), "names 'a.pt', which the archive does not have"),
        (mar({"a.pt": b"", "model.pt": b""}, serializedFile="a.pt"), "'1/model.pt' is there twice"),
        (mar({"a.pt": b""}, serializedFile=["a.pt"]), "'serializedFile' of 'model' is no string"),
        (mar({"../a.pt": b""}, serializedFile="../a.pt"), "member '../a.pt': it climbs out with '..'"),
        (zipped(items_of({"a.pt": b""})), "it has no MAR-INF/MANIFEST.json"),
        (zipped(items_of({"MAR-INF/MANIFEST.json": b"[]"})), "MANIFEST.json is damaged"),
        (zipped(items_of({"MAR-INF/MANIFEST.json": b"[" * 100_000})), "MANIFEST.json is damaged"),
        (zipped(items_of({"MAR-INF/MANIFEST.json": b"\xff"})), "MANIFEST.json is damaged"),
        (zipped(items_of({"MAR-INF/MANIFEST.json": b" " * (1 << 20) + b"{}"})), "has more than 1048576 bytes"),
        (b"no zip", "it is damaged"),
    ],
    ids=range(11),
)
def test_a_malformed_torchserve_archive_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    result = load(content, tmp_path)
    assert isinstance(result, str)
    assert why in result
