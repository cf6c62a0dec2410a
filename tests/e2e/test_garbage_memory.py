"""Garbage of models in threads of the server: it is found, and soon enough, though the collector runs seldom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.e2e.conftest import Reply

CONFIG = """backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
parameters { key: "isolation" value { string_value: "thread" } }
"""
#: ``WEIGHTS`` is in a circle with the functions of its module, as all that a module names is.
HOARDS = """
import triton_python_backend_utils as pb_utils

WEIGHTS = bytearray(b"w") * (200 << 20)

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value(each))]) for each in requests]

def value(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
"""
#: A cycle around 1 MiB for each request; a first request with 0 creates many live objects.
CIRCLES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.value(each))]) for each in requests]

    def value(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if value[0, 0]:
            circle = [b"c" * (1 << 20)]
            circle.append(circle)
        else:
            self.kept = [[] for _ in range(200_000)]
        return value
"""
MIB = 1 << 20


def test_an_unloaded_model_leaves_no_memory_and_cycles_of_requests_are_collected(
    tmp_path: Path, serve: Callable[..., Headrace], post: Callable[..., Reply], wait_until: Callable[..., None]
) -> None:
    for name, module in (("hoards", HOARDS), ("circles", CIRCLES)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
        (tmp_path / name / "1" / "model.py").write_text(module)
    server = serve(f"--model-repository={tmp_path}", "--model-control-mode=explicit", "--load-model=*")
    with_weights = server.rss_bytes
    assert post(server, "/v2/repository/models/hoards/unload", {}).status == 200
    wait_until(lambda: server.rss_bytes < with_weights - 190 * MIB, "the weights are freed")

    def ask(value: int) -> None:
        document = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}
        assert post(server, "/v2/models/circles/infer", document).status == 200

    ask(0)  # collections find nothing, and become rarer
    server.forget_peak()
    before = server.rss_bytes
    for _ in range(1200):
        ask(1)
    # By default, and without a server around it, Python lets 700 of them pile up.
    assert server.peak_rss_bytes < before + 900 * MIB
