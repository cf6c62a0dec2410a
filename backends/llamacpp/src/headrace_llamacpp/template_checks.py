"""A process that runs the chat template of a model first, within limits of memory and time.

A template is a program, which llama.cpp runs when it opens a model and for each chat, without limits. So a process,
``python -m headrace_llamacpp.run_templates``, does both before the engine does. Its llama.cpp has a model without
weights, and the same template. It takes 70 MB, and 0.3 ms for a short chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headrace import BackendError, InvalidArgument, LoadError, Model
from headrace_llamacpp.gguf import read_tokens
from headrace_llamacpp.llama_server import ModelFiles, private_folder
from headrace_llamacpp.stand_in import CLOSED, write_stand_in
from headrace_llm import BoundedProcess

#: The longest that llama.cpp may read a template, and render one chat, in seconds; and the memory of the process.
LOAD_S, LIMIT_S = 10.0, 2.0
LIMIT_BYTES = 512 << 20
_TEMPLATE: Final = "tokenizer.chat_template"
#: The members of a body for llama.cpp that decide the prompt.
_OF_CHATS: Final = ("messages", "tools", "tool_choice", "parallel_tool_calls")


class TemplateChecks:
    """Runs ``templates``, which are members of a GGUF file. Any thread; one chat at a time.

    ``begin`` and ``end`` are the tokens at the two ends of a text. ``model`` and ``file`` are named in errors.
    """

    def __init__(self, templates: Mapping[str, str], begin: str, end: str, model: str, file: str) -> None:
        self._templates, self._begin, self._end, self._file = templates, begin, end, file
        self._who = f"the chat template of model '{model}'"
        self._process = BoundedProcess("headrace_llamacpp.run_templates", LIMIT_BYTES)

    @classmethod
    def of(cls, model: Model, files: ModelFiles) -> TemplateChecks | None:
        """Return the process for the templates of ``model``, open; None if it has none. Raises `LoadError`."""
        own = {name: str(text) for name, text in files.header.members.items() if name.startswith(_TEMPLATE)}
        replaced = model.parameters.chat_template
        templates = {_TEMPLATE: files.chat_template} if replaced else own
        if not templates:
            return None
        ends = [files.header.members.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos")]
        begin, end = (number if type(number) is int else -1 for number in ends)
        tokens = read_tokens(files.weights, files.header, (begin, end))
        marks = tokens.get(begin) or "<s>", tokens.get(end) or "</s>"
        process = cls(templates, *marks, model.name, replaced or str(files.weights))
        process.open()
        return process

    def open(self) -> None:
        """Make llama.cpp read the templates. Blocks, for at most `LOAD_S` and a start. Raises `LoadError`."""
        with private_folder() as folder:
            file = Path(folder) / "stand_in.gguf"
            write_stand_in(file, self._templates, self._begin, self._end)
            answer = self._ask({"file": str(file), "folder": folder}, LOAD_S)
        if answer is None:
            raise LoadError(f"{self._too_much(LOAD_S)} when llama.cpp reads it from '{self._file}'")
        if answer:
            raise LoadError(f"{self._who} in '{self._file}' is not valid for llama.cpp: {answer.decode()}")

    def check(self, body: Mapping[str, Any]) -> None:
        """Render the messages of ``body``, which is one for llama.cpp. Blocks, for at most `LIMIT_S` and a start.

        Raises `InvalidArgument` if that takes too much. llama.cpp itself reports all other errors.
        """
        chat = {name: body[name] for name in _OF_CHATS if name in body}
        chat["messages"] = [_without_images(message) for message in chat["messages"]]
        answer = self._ask({"chat": chat}, LIMIT_S)
        while answer == CLOSED:  # another chat has ended it
            self.open()
            answer = self._ask({"chat": chat}, LIMIT_S)
        if answer is None:
            raise InvalidArgument(f"{self._too_much(LIMIT_S)} for these messages")

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, asked: Mapping[str, Any], limit_s: float) -> bytes | None:
        try:
            return self._process.ask(json.dumps(asked).encode(), limit_s)
        except BackendError as error:
            raise BackendError(f"{self._who}: the process that runs it first cannot start") from error

    def _too_much(self, limit_s: float) -> str:
        return f"{self._who} takes more than {limit_s:g} s or {LIMIT_BYTES >> 20} MiB, or ends its process,"


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with a marker in the place of each image, as llama.cpp renders it."""
    content = message.get("content")
    if type(content) is not list:
        return dict(message)
    marker = {"type": "text", "text": "<__media__>"}
    return {**message, "content": [marker if part.get("type") == "image_url" else part for part in content]}
