"""Chat templates are programs of strangers: they run in a process with limits before the engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from headrace import InvalidArgument, LoadError, Model, ModelConfig
from headrace_llamacpp import template_checks
from headrace_llamacpp.llama_server import find_files
from headrace_llamacpp.parameters import Parameters
from headrace_llamacpp.template_checks import TemplateChecks
from tests.backends.llamacpp.gguf_files import write_gguf

LONG = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
LARGE = "{% for i in range(1000000000) %}{{ i }}{% endfor %}"
#: llama.cpp goes on after the memory that misses here, when it opens the model.
LARGE_FOR_SOME = "{% if messages | length > 2 %}" + LARGE + "{% endif %}x"
ON_A_WORD = (
    "{% if messages[0].content == 'large' %}"
    + LARGE
    + "{% endif %}{% if messages[0].content == 'long' %}"
    + (LONG + "{% endif %}{{ messages[0].content }}")
)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TemplateChecks]]:
    """Returns the process for a file with these members, with tokens that a template can name. It may have 128 MiB."""
    monkeypatch.setattr(template_checks, "LIMIT_BYTES", 128 << 20)
    processes: list[TemplateChecks] = []

    def opened(**members: str) -> TemplateChecks:
        path = tmp_path / "model.gguf"
        tokens = {"tokenizer.ggml.tokens": ["a", "<begin>", "<end>"]}
        ends = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
        templates = {f"tokenizer.{name}": text for name, text in members.items()}
        write_gguf(path, {"general.architecture": "llama", **ends, **tokens, **templates}, {})
        model = Model("m", 1, tmp_path, ModelConfig(), Parameters())
        process = TemplateChecks.of(model, find_files(model))
        assert process is not None
        processes.append(process)
        return process

    yield opened
    for process in processes:
        process.close()


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("template", "most_s"),
    [(LONG, 1.0), (LARGE_FOR_SOME, 30.0), ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 30.0)],
)
def test_a_template_that_takes_too_much_is_refused_at_load(
    template: str, most_s: float, opened: Callable[..., TemplateChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_checks, "LOAD_S", most_s)
    with pytest.raises(
        LoadError, match=r"template of model 'm' takes more than [0-9]+ s or 128 MiB, .* reads it from '.*/model.gguf'"
    ):
        opened(chat_template=template)


def test_a_template_for_tools_is_a_template_and_one_that_is_wrong_says_what(
    opened: Callable[..., TemplateChecks],
) -> None:
    with pytest.raises(LoadError, match="takes more than"):
        opened(**{"chat_template": "x", "chat_template.tool_use": LARGE})
    with pytest.raises(LoadError, match=r"in '.*/model.gguf' is not valid for llama.cpp: Unexpected token: %}"):
        opened(chat_template="{% for x in %}")


def test_a_chat_that_takes_too_much_is_refused_and_the_next_one_is_not(
    opened: Callable[..., TemplateChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = opened(chat_template=ON_A_WORD)
    process.check(chat("hello"))
    for word in ("large", "long"):
        monkeypatch.setattr(template_checks, "LIMIT_S", 0.5)
        begin = perf_counter()
        with pytest.raises(InvalidArgument, match=r"template of model 'm' takes more than 0.5 s .* for these messages"):
            process.check(chat(word))
        assert perf_counter() - begin < 5
        monkeypatch.setattr(template_checks, "LIMIT_S", 30.0)
        process.check(chat("hello"))  # it starts again


def test_the_template_is_run_with_the_tokens_of_the_file_and_with_markers_for_images(
    opened: Callable[..., TemplateChecks],
) -> None:
    """Otherwise one that waits for them would pass."""
    with pytest.raises(LoadError, match="takes more than"):
        opened(chat_template="{% if bos_token == '<begin>' and eos_token == '<end>' %}" + LARGE + "{% endif %}")
    process = opened(
        chat_template="{% for m in messages %}{% if 'secret' in m.content %}" + LARGE + "{% endif %}{% endfor %}"
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    process.check(chat([image, {"type": "text", "text": "hello"}]))
    with pytest.raises(InvalidArgument, match="for these messages"):
        process.check(chat([image, {"type": "text", "text": "secret"}]))
