"""The program of `headrace_openai.template_process`: compiles a template, and renders it with values.

An input has two lines of JSON: the template with its name, and the values; without values it is only compiled. The
answer is a text and an error, one of which is empty.
"""

from __future__ import annotations

from functools import lru_cache

import orjson
from jinja2 import Template

from headrace import HeadraceError
from headrace_llm import serve_job
from headrace_openai.bounded_templates import compile_template, render


def answer(given: bytes) -> bytes:
    """Return the answer to one input."""
    source, _, values = given.partition(b"\n")
    try:
        template, who = _compiled(source)
        text, wrong = render(template, orjson.loads(values), who) if values else "", ""
    except HeadraceError as error:
        text, wrong = "", error.message
    return orjson.dumps([text.encode("utf-8", "replace").decode(), wrong])


@lru_cache(1)
def _compiled(source: bytes) -> tuple[Template, str]:
    text, who = orjson.loads(source)
    return compile_template(text, who), who


if __name__ == "__main__":
    serve_job(answer)
