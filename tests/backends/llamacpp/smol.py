"""Requests to SmolLM2, and to llama.cpp itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace import BytesTensor, InferRequest, InferResponse, Server
from headrace_testing.serving import on_loop

#: Of tests that share a model: few slots, so that requests wait, and a context that some prompts exceed.
SETTINGS = {
    "context": "256",
    "slots": "4",
    "max_streams": "16",
    "threads": "1",
    "isolation": "thread",
    "chat_template": "tools.jinja",
    "lora.loud": "loud.gguf",
}
#: A chat template with tools: the model's own has none.
TEMPLATE = Path(__file__).with_name("tools.jinja").read_text()


#: What the model ``scripted`` writes to every chat, token by token.
CALL = (
    "I\u2581look.\n",
    "<tool_call>\n",
    '{"name":\u2581"get_weather",',
    '\u2581"arguments":',
    '\u2581{"city":',
    '\u2581"Par',
    'is"}',
    "}\n</tool_call>",
)
#: Of tests for which any text will do.
TINY = {"context": "1024", "slots": "4", "threads": "1"}


def put_model(
    repository: Path, name: str, weights: Path | None, parameters: Mapping[str, str], file: str = "model.gguf"
) -> Path:
    """Add a model to ``repository``, and return its version's directory."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    if weights is not None:
        try:
            os.link(weights, version / file)
        except OSError:
            shutil.copy(weights, version / file)
    if parameters:
        members = (
            f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()
        )
        (repository / name / "config.pbtxt").write_text('backend: "llamacpp"\n' + "\n".join(members))
    return version


def direct(engine: Any, **body: Any) -> list[dict[str, Any]]:
    """Return what llama.cpp answers to ``body``."""
    given: list[dict[str, Any]] = []
    handle = engine.handle_chat_completions if "messages" in body else engine.handle_completions
    handle(body, given.append)
    return given


def request(text: str = "", *asked: str, model: str = "smol", sampling: Any = None, **more: Any) -> InferRequest:
    """Return a request for ``text``, or for the inputs ``messages``, ``tools``, ``tool_choice``, ``input_ids``.

    ``asked`` are inputs that are true."""
    inputs: dict[str, Any] = {name: np.array([True]) for name in asked}
    if text:
        inputs["text_input"] = np.array([text], object)
    for name in ("messages", "tools", "tool_choice"):
        if name in more:
            inputs[name] = np.array([orjson.dumps(more.pop(name)).decode()], object)
    if "input_ids" in more:
        inputs["input_ids"] = np.array(more.pop("input_ids"), np.int32)
    sampling = {"temperature": 0, "max_tokens": 8} | (sampling or {})
    inputs["sampling_parameters"] = np.array([orjson.dumps(sampling).decode()], object)
    return InferRequest(model, inputs, **more)


async def responses(server: Server, sent: InferRequest) -> list[InferResponse]:
    return [response async for response in server.engine.responses(sent)]


def ask(server: Server, *arguments: Any, **more: Any) -> list[InferResponse]:
    """Return the responses to `request` of the same arguments."""
    return on_loop(server, responses(server, request(*arguments, **more)))


def text(given: list[InferResponse], name: str = "text_output") -> str:
    """Return the strings of the output ``name`` of all responses, joined."""
    items = []
    for response in given:
        tensor = response.outputs.get(name)
        if tensor is not None:
            assert isinstance(tensor, BytesTensor)
            items += tensor.items()
    return b"".join(items).decode()


def numbers(given: list[InferResponse], name: str) -> list[Any]:
    """Return the numbers of the output ``name`` of all responses."""
    return [number for response in given for number in np.asarray(response.outputs[name]).tolist()]
