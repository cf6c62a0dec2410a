"""A model whose ``initialize`` or ``finalize`` never ends can be unloaded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

from tests.conftest import Headrace, wait_until

STUCK = """
import time
class TritonPythonModel:
    def initialize(self, args):
        open(__file__ + ".began", "w").close()
        time.sleep(1000)
    def execute(self, requests):
        return []
"""


def test_unload_ends_an_endless_load(
    serve: Callable[..., Headrace], write_model: Callable[..., Path], tmp_path: Path
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


NEVER_FINALIZED = """
import time
class TritonPythonModel:
    def execute(self, requests):
        open(__file__ + ".began", "w").close()
        time.sleep(1.5)
        out = pb_utils.Tensor("OUT", np.array([7], np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
    def finalize(self):
        time.sleep(1000)
"""


def test_a_finalize_that_hangs_is_ended_in_time_after_requests_that_took_theirs(
    run_headrace: Callable[..., Headrace], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Four fifths of the time to stop are more than the request has left of it."""
    model = write_model("m", NEVER_FINALIZED)
    server = run_headrace(f"--model-repository={tmp_path}", "--exit-timeout-secs=5").wait_until_ready()
    answers: list[float] = []

    def ask() -> None:
        what = client.InferInput("WHAT", [1], "BYTES")
        what.set_data_from_numpy(np.array([b""], np.object_))
        with client.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=60) as asking:
            answers.extend(asking.infer("m", [what]).as_numpy("OUT"))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until((model / "1" / "model.py.began").exists, "execute has begun")
    assert server.finish(signal.SIGTERM) == 0, server.log
    asking.join(10)
    assert answers == [7]
    assert "instance 'm_0_0' did not close within" in server.log
