#!/usr/bin/env python3
"""Talk to a language model of a running server. Its answer is printed word by word. Needs only Python."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Message: TypeAlias = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    conversation: list[Message] = []
    try:
        for question in [" ".join(options.question)] if options.question else _questions():
            conversation.append({"role": "user", "content": question})
            answer = ""
            for part in answers(options.http, options.model, conversation, options.max_tokens):
                print(part, end="", flush=True)
                answer += part
            print()
            conversation.append({"role": "assistant", "content": answer})
    except OSError as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/chat/models", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def answers(address: str, model: str, conversation: Sequence[Message], max_tokens: int) -> Iterator[str]:
    """Yield the parts of the model's next message."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.2}
    document = {"messages": json.dumps(conversation), "sampling_parameters": json.dumps(sampling), "stream": True}
    url = f"http://{address}/v2/models/{model}/generate_stream"
    request = urllib.request.Request(url, json.dumps(document).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as events:
        for line in events:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    raise OSError(event["error"])
                yield event["text_output"]


def _questions() -> Iterator[str]:
    """Yield lines of the standard input until its end."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="*", help="a question; without it, you are asked for one after the other")
    parser.add_argument("--http", default="localhost:8000", help="address of the server (default %(default)s)")
    parser.add_argument("--model", default="smollm", help="the model (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="the longest answer (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
