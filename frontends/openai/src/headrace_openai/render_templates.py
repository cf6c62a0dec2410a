"""The program of `headrace_openai.template_process`: renders one template with the values of each line.

The first line is empty, the second the template and its name, and all others are values; each is JSON. The answer is a
text and an error, one of which is empty. The one argument is the memory that the process may allocate, in bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from headrace import HeadraceError
from headrace_openai.bounded_templates import compile_template, render


def main() -> None:
    """Answer each line of the standard input until it ends."""
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = sys.stdin.buffer
    lines.readline()
    _print("", "")
    source, who = orjson.loads(lines.readline())
    template = _tried(partial(compile_template, source, who))
    for line in lines:
        _tried(partial(render, template, orjson.loads(line), who))


def _tried(run: Callable[[], Any]) -> Any:
    """Print what ``run`` returns if it is text, or its error."""
    try:
        made = run()
    except HeadraceError as error:
        _print("", error.message)
        return None
    _print(made if type(made) is str else "", "")
    return made


def _print(text: str, wrong: str) -> None:
    sys.stdout.buffer.write(orjson.dumps([text.encode("utf-8", "replace").decode(), wrong]) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
