"""Templates of chats: those that are wrong fail the load, and those that do harm are stopped."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from headrace import BackendError, ConfigError, InternalError, InvalidArgument
from headrace_openai import bounded_templates, template_process
from headrace_openai.bounded_templates import compile_template, render
from headrace_openai.chat_templates import ChatTemplate
from headrace_testing.serving import serve
from tests.frontends.openai.model_files import STORY_PY, scripted_config

#: What the documents of Hugging Face show, with the loop controls that some templates have.
CHATML = """{% for message in messages %}{% if message['role'] == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- if loop.last and add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
{%- endfor %}"""


def made(source: str, **values: Any) -> str:
    return render(compile_template(source, "it"), {"messages": [{"role": "user", "content": "hi"}], **values}, "it")


def test_a_template_of_hugging_face_is_rendered() -> None:
    messages = [{"role": "system", "content": " Be kind. "}, {"role": "skip"}, {"role": "user", "content": "Hi"}]
    wanted = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert made(CHATML, messages=messages, add_generation_prompt=True) == wanted
    assert made("{{ tools | tojson }}", tools=[{"é": "<&>"}]) == '[{"é": "<&>"}]'


def test_arguments_of_calls_are_objects() -> None:
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }};{% endfor %}"
    template = ChatTemplate(source, "it")
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a":1}', "oh", None)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert asyncio.run(template.render([message], (), {})) == '{"a": 1};"oh";null;'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 10000 steps",
        ),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "fails: RecursionError"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than 10000 steps",
        ),
        ("{{ range(10 ** 9) | list }}", "has the operator \\*\\*"),
        ("{{ 'a' * 99999999 }}", "more than 16777216 characters"),
        ("{{ '%999999999d' % 1 }}", "has the operator %"),
        ("{% for a in range(2000) %}{{ 'a' * 10000 }}{% endfor %}", "a prompt of more than 16777216 characters"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}", "fails: "),
        ("{% include '/etc/passwd' %}", "fails: "),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('no system') }}", "refuses the messages: no system"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
    ],
)
def test_a_template_that_does_harm_is_stopped(source: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MOST_STEPS", 10_000)
    with pytest.raises(InvalidArgument, match=text):
        made(source)


@pytest.mark.parametrize("source", [
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{{ '{:>1000000000}'.format('a') | length }}",
    "{{ 'a'.ljust(1000000000) | length }}",
    "{{ [1] | tojson(indent=1000000000) | length }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{{ messages | length | round(999999999, 'ceil') }}",
])  # fmt: skip
def test_one_expression_takes_neither_the_memory_nor_the_lock_of_the_server(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "LIMIT_S", 0.4)
    monkeypatch.setattr(template_process, "LIMIT_BYTES", 128 << 20)
    template, began_s = ChatTemplate("{% if go %}" + source + "{% endif %}fine", "it"), monotonic()
    with pytest.raises(InvalidArgument, match=r"it takes more than 0\.4 s or 128 MiB|it fails: MemoryError"):
        asyncio.run(template.render([{"role": "user"}], (), {"go": True}))
    assert monotonic() - began_s < 2
    if source.startswith("{{ 'a'"):  # the next one starts the process again
        assert asyncio.run(template.render([], (), {})) == "fine"


def test_a_template_may_not_compile_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "LIMIT_S", 0.4)
    with pytest.raises(ConfigError, match=r"it takes more than 0\.4 s or 512 MiB to compile"):
        ChatTemplate("{{ 1 | round(999999999, 'ceil') }}", "it")


def test_a_template_without_its_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BackendError, match="it: the process that renders it cannot start"):
        ChatTemplate("{{ 1 }}", "it")


def test_a_template_may_not_run_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MOST_S", 0.0)
    with pytest.raises(InvalidArgument, match="runs for more than 0 s"):
        made("{% for a in range(1000) %}{% endfor %}")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"chat_template": "{% for a in b %}"}, "parameter 'chat_template': line 1: Unexpected end of template"),
        ({"chat_template": "nothing.jinja"}, "no file .*nothing.jinja"),
        ({"chat_template": "../../secret"}, "outside the model directory"),
        ({"tool_call_parser": "magic"}, "'tool_call_parser' is 'magic', expected one of hermes, llama3_json, mistral"),
    ],
)
def test_a_wrong_setting_fails_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parameters: dict[str, str], text: str
) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(STORY_PY)
    (tmp_path / "m/config.pbtxt").write_text(scripted_config("messages", parameters=parameters))
    with pytest.raises(InternalError, match="failed to load"), serve(tmp_path):
        pass
    assert re.search(text, caplog.text)


def test_a_model_with_messages_has_its_template_in_its_engine(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(STORY_PY)
    (tmp_path / "m/config.pbtxt").write_text(scripted_config(parameters={"chat_template": "{% for a in b %}"}))
    with serve(tmp_path) as server:
        assert server.engine.resolve("m").name == "m"


def test_a_template_without_jinja_names_what_installs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_openai.chat_templates.find_spec", lambda name: None)
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(STORY_PY)
    (tmp_path / "m/config.pbtxt").write_text(scripted_config("messages", parameters={"chat_template": "{{ 1 }}"}))
    with pytest.raises(InternalError, match="failed to load"), serve(tmp_path):
        pass
    assert "pip install 'headrace-openai[templates]'" in caplog.text
