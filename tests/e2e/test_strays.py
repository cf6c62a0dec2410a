"""A model of any kind that raises an exception that is no `Exception` fails its request and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

    Start = Callable[..., Headrace]

KINDS = ["SystemExit", "CancelledError", "KeyboardInterrupt", "GeneratorExit"]
MODEL = """
import asyncio
import triton_python_backend_utils as pb_utils

KINDS = [SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit]

class TritonPythonModel:
    {how}def execute(self, requests):
        responses = []
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if number < len(KINDS):
                raise KINDS[number]("stray")
            tensor = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]))
        return responses
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("how", ["", "async "])
def test_it_fails_the_request_and_the_next_one_is_served(
    run_headrace: Start,
    tmp_path: Path,
    add_model: Callable[..., Path],
    echo: str,
    post: Any,
    infer: Any,
    isolation: str,
    how: str,
) -> None:
    setting = f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    version = add_model(tmp_path, "m", f'backend: "python"{echo}{setting}')
    (version / "model.py").write_text(MODEL.format(how=how))
    server = run_headrace(f"--model-repository={tmp_path}", "--exit-timeout-secs=20").wait_until_ready()
    for number, kind in enumerate(KINDS):
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [number]}
        reply = post(server, "/v2/models/m/infer", {"inputs": [tensor]})
        assert reply.status == 500
        assert kind in reply.error
        assert infer(server, "m", (7.0,)) == [7.0]
    assert server.metric("nv_inference_request_failure", "m", reason="BACKEND") == len(KINDS)
    assert server.finish(signal.SIGTERM) == 0
    for kind in KINDS:
        assert kind in server.log
