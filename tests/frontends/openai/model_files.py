"""The models of these tests: language models in Python, without an engine."""

from __future__ import annotations

from pathlib import Path

#: Only a prompt, its text, and sampling parameters.
STORY = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
STORY_PY = '''
"""Writes the words of the prompt, one in each response."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            sampling = {} if given is None else json.loads(given.as_numpy()[0])
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            for word in prompt.split()[: sampling.get("max_tokens")]:
                sender.send(pb_utils.InferenceResponse([text(f" {word}")]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def text(value):
    return pb_utils.Tensor("text_output", np.array([value], object))
'''
#: No language model.
PLAIN = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""


def write_models(folder: Path) -> Path:
    """Write the models to ``folder``. Return it."""
    for name, config, source in (("story", STORY, STORY_PY), ("plain", PLAIN, "")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if source:
            (folder / name / "1/model.py").write_text(source)
    return folder
