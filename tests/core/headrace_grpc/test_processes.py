"""What gRPC needs of its files and of its peers, in frontend processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """
backend: "identity"
input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "echo/1").mkdir(parents=True)
    (tmp_path / "echo/config.pbtxt").write_text(CONFIG)
    return [f"--model-repository={tmp_path}", "--frontend-processes=1", "--grpc-use-ssl=true"]


def test_they_speak_tls(serve: Callable[..., Headrace], words: list[str], pem: Path) -> None:
    server = serve(*words, f"--grpc-server-cert={pem / 'cert.pem'}", f"--grpc-server-key={pem / 'key.pem'}")
    url, root = f"localhost:{server.grpc}", str(pem / "cert.pem")
    with grpcclient.InferenceServerClient(url, ssl=True, root_certificates=root) as client:
        tensor = grpcclient.InferInput("IN", [20000], "FP32")
        values = np.arange(20000, dtype=np.float32)
        tensor.set_data_from_numpy(values)
        assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), values)
        assert client.get_model_metadata("echo").name == "echo"


def test_a_file_that_is_missing_is_named_and_nothing_is_left_behind(
    run_headrace: Callable[..., Headrace], words: list[str], tmp_path: Path
) -> None:
    missing = tmp_path / "no.crt"
    server = run_headrace(*words, f"--grpc-server-cert={missing}", f"--grpc-server-key={missing}")
    assert server.finish() == 1
    assert f"can not read '{missing}': No such file or directory" in server.log
    assert "Traceback" not in server.log
