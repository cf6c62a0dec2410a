"""The models of these tests: language models in Python, without an engine.

The prompt is a script: JSON that says what the model answers. See ``play`` in `SCRIPTED_PY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Only a prompt and its text: what the shortest model.py has.
STORY = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
parameters { key: "isolation" value { string_value: "thread" } }
"""
STORY_PY = '''
"""Writes the words of the prompt, one in each response."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            for word in prompt.split():
                output = pb_utils.Tensor("text_output", np.array([f" {word}"], object))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
#: All inputs and outputs of the contract that Python can make.
_INPUTS = {
    "text_input": ("STRING", 1), "messages": ("STRING", 1), "tools": ("STRING", 1), "tool_choice": ("STRING", 1),
    "sampling_parameters": ("STRING", 1), "image": ("STRING", -1), "input_ids": ("INT32", -1), "stream": ("BOOL", 1),
    "exclude_input_in_output": ("BOOL", 1), "return_finish_reason": ("BOOL", 1), "return_logprobs": ("BOOL", 1),
    "return_num_input_tokens": ("BOOL", 1), "return_num_output_tokens": ("BOOL", 1),
}  # fmt: skip
_OUTPUTS = {
    "text_output": "STRING", "finish_reason": "STRING", "logprobs": "STRING", "tool_calls": "STRING",
    "reasoning": "STRING", "num_input_tokens": "UINT32", "num_output_tokens": "UINT32",
}  # fmt: skip
SCRIPTED_PY = '''
"""Plays a script: the last message, or the prompt behind its last '§', is JSON.

A list: what each response has. "show": one text, the inputs as JSON. "wait": until the caller has left.
"""

import json
import time
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

STRINGS = ("text_output", "finish_reason", "logprobs", "tool_calls", "reasoning")
HERE = Path(__file__).parent


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                play(request, sender)
            except Exception as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{error!r}")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def play(request, sender):
    given = {each.name(): value(each.as_numpy()) for each in request.inputs()}
    for name in ("messages", "tools", "tool_choice", "sampling_parameters"):
        if name in given:
            given[name] = json.loads(given[name])
    given["parameters"] = json.loads(request.parameters() or "{}")
    given["id"] = request.request_id()
    text = given["messages"][-1]["content"] if "messages" in given else given.get("text_input", "show")
    script = text.rpartition("§")[2].partition("§")[0].strip() if "§" in text else text
    if script == "show":
        script = json.dumps([{"text_output": json.dumps(given)}])
    if script == "wait":
        sender.send(pb_utils.InferenceResponse([tensor("text_output", "waiting")]))
        while not request.is_cancelled():
            time.sleep(0.005)
        (HERE / "left").write_text("yes")
        return
    for part in json.loads(script):
        if "error" in part:
            raise ValueError(part["error"])
        sender.send(pb_utils.InferenceResponse([tensor(name, each) for name, each in part.items()]))


def value(array):
    values = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    return values[0] if len(values) == 1 else values


def tensor(name, given):
    if name not in STRINGS:
        return pb_utils.Tensor(name, np.array([given], np.uint32))
    if isinstance(given, dict):  # bytes that are no text by themselves
        return pb_utils.Tensor(name, np.array([bytes.fromhex(given["hex"])], object))
    return pb_utils.Tensor(name, np.array([given if isinstance(given, str) else json.dumps(given)], object))
'''
#: No language model.
PLAIN = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""
#: With a file ``template.jinja``, tools in the form of Hermes, and no input for messages.
TEMPLATE = """{%- if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% if message.role == 'system' and loop.length == 1 %}{{ raise_exception('there is only a system message') }}{% endif %}
{% if message.content == 'loop' %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% endif %}
{%- endfor %}{{ mood }}<assistant>§{{ messages[-1].content }}"""


def scripted_config(*left_out: str, parameters: Mapping[str, str] | None = None) -> str:
    """Return the config of a model that plays scripts, without these inputs."""
    lines = ['backend: "python"', "model_transaction_policy { decoupled: true }", "instance_group { count: 1 }"]
    for name, (kind, dim) in _INPUTS.items():
        if name not in left_out:
            lines.append(f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [{dim}] optional: true }}')
    lines += [f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [-1] }}' for name, kind in _OUTPUTS.items()]
    for name, value in {"isolation": "thread", **(parameters or {})}.items():
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}')
    return "\n".join(lines)


def write_models(folder: Path) -> Path:
    """Write the models to ``folder``. Return it."""
    chat = {"chat_template": "template.jinja", "tool_call_parser": "hermes"}
    for name, config, source in (
        ("story", STORY, STORY_PY),
        ("scripted", scripted_config(), SCRIPTED_PY),
        ("templated", scripted_config("messages", "tools", "tool_choice", parameters=chat), SCRIPTED_PY),
        ("plain", PLAIN, ""),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if source:
            (folder / name / "1/model.py").write_text(source)
    (folder / "templated/template.jinja").write_text(TEMPLATE)
    return folder
