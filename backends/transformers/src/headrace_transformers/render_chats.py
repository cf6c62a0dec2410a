"""The program of `headrace_transformers.chat`: renders one chat with a template, as transformers does.

An input is JSON: the template, the special tokens by name, messages and tools. The answer is a prompt and an error, one
of which is empty.
"""

from __future__ import annotations

import json
from typing import Any

from headrace import one_line
from headrace_llm import serve_job


def main() -> None:
    """Answer each chat of the standard input until it ends."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # it imports no torch

    class ChatTokenizer(PreTrainedTokenizerBase):  # type: ignore[misc]  # transformers has no types
        """The part of a tokenizer that makes prompts."""

        special_tokens_map: dict[str, Any] = {}  # noqa: RUF012 (each object gets its own)

    def answer(given: bytes) -> bytes:
        tokenizer = ChatTokenizer()
        tokenizer.chat_template, tokenizer.special_tokens_map, messages, tools = json.loads(given)
        try:
            made = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever the template does
            return json.dumps(["", f"{type(error).__name__}: {one_line(str(error))[:300]}"]).encode()
        return json.dumps([made, ""]).encode()

    serve_job(answer)


if __name__ == "__main__":
    main()
