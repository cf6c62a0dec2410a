"""Files of a model whose reader would wait for ever: they must not stop other models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [3] }
output { name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value {
  data_type: TYPE_FP32 dims: 3 input_data_file: "data" } } }
"""
#: The file that blocks, by the backend whose model has it.
BLOCKING = {
    "pytorch": ["1/model.pt", "1/model.pt2", "1/model.safetensors", "1/model.py", "labels.txt", "1/.hidden"],
    "onnxruntime": ["1/model.onnx", "1/weights.bin", "warmup/data"],
    "openvino": ["1/model.xml", "1/model.bin"],
    "tensorflow": ["1/model.savedmodel/saved_model.pb", "1/model.savedmodel/variables/variables.index"],
    "tensorrt": ["1/model.plan"],
    "python": ["1/model.py", "requirements.txt"],
    "identity": ["labels.txt", "warmup/data", "initial_state/zeros"],
}


def write(model: Path, backend: str, blocking: str, make: Callable[[Path], None]) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(f'backend: "{backend}"' + TENSORS)
    path = model / blocking
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


def link_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.usefixtures("of_its_own")
@pytest.mark.parametrize("kind", ["a FIFO", "a character device"])
def test_files_that_block_stop_nobody(
    kind: str,
    serve_models: Callable[..., Headrace],
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
) -> None:
    make = os.mkfifo if kind == "a FIFO" else link_device
    repository, names = tmp_path / "repository", []
    for backend, files in BLOCKING.items():
        for number, blocking in enumerate(files):
            names.append((f"{backend}_{number}", blocking))
            write(repository / names[-1][0], backend, blocking, make)
    (repository / "config" / "1").mkdir(parents=True)
    make(repository / "config" / "config.pbtxt")
    names.append(("config", "config.pbtxt"))
    server = serve_models(repository, "--allow-external-links=true")
    with (
        under_attack(server),
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=20.0) as client,
    ):
        for name, blocking in names:
            with pytest.raises(InferenceServerException, match=f"'{name}/{blocking}' is {kind}"):
                client.load_model(name)
        assert {name for name, _ in names} < {line["name"] for line in client.get_model_repository_index()}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
