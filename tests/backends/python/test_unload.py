"""A model that never ends its ``initialize`` can be got rid of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

from tests.conftest import Penstock, wait_until

STUCK = """
import time
class TritonPythonModel:
    def initialize(self, args):
        open(__file__ + ".began", "w").close()
        time.sleep(1000)
    def execute(self, requests):
        return []
"""


def test_unloading_ends_a_load_that_never_would(
    serve: Callable[..., Penstock], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    stuck = write_model("stuck", STUCK)
    server = serve(f"--model-repository={tmp_path}", "--model-control-mode=explicit", "--log-verbose=0")
    errors: list[str] = []

    def load() -> None:
        with (
            client.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=60) as asking,
            pytest.raises(InferenceServerException) as refused,
        ):
            asking.load_model("stuck")
        errors.append(str(refused.value))

    loading = threading.Thread(target=load)
    loading.start()
    wait_until((stuck / "1" / "model.py.began").exists, "initialize has begun")
    with client.InferenceServerClient(f"127.0.0.1:{server.http}") as other:
        other.unload_model("stuck")
        loading.join(10)
        assert "was unloaded while it was loading" in errors[0]
        assert not other.is_model_ready("stuck")
