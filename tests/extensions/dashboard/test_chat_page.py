"""The chat page in a real Chromium with a real server. The models return their input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Page, expect

from tests.frontends.openai.model_files import write_models
from tests.interceptors.access.access_files import ALL, make

from .conftest import CHROMIUM

if TYPE_CHECKING:
    from tests.conftest import Headrace

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
MARKUP = "<img src=x onerror=alert(1)>"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("keys") / "access.json"
    return path, make(path, alice=ALL)["alice"]


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], models: Path, key: tuple[Path, str]) -> Headrace:
    return keep_serving(f"--model-repository={models}", f"--access-keys={key[0]}", "--access-open=health,dashboard")


@pytest.fixture
def open_page(new_page: Callable[[Headrace], Page], server: Headrace, key: tuple[Path, str]) -> Open:
    """Return a function that opens the page with a key."""

    def open_page(model: str = "scripted", has_openai: bool = True) -> Page:
        page = new_page(server)
        if not has_openai:
            page.route("**/v1/**", lambda route: route.fulfill(status=404, body='{"error":"Not Found"}'))
        page.goto(f"http://127.0.0.1:{server.http}/dashboard/chat?model={model}")
        page.get_by_label("This server asks for a key").fill(key[1])
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_label("Model")).to_have_value(model)
        return page

    return open_page


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def response_parameters(page: Page, number: int) -> Any:
    """Return the model's input, from its answer ``number``."""
    answers = page.locator("article.assistant")
    expect(answers).to_have_count(number)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return json.loads(answers.last.inner_text().partition("\n")[2])


def test_an_answer_is_shown_as_it_streams_with_its_numbers(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Use it").wait_for(state="hidden")
    script = [{"text_output": text, "num_output_tokens": 2} for text in ("Hel", "lo ", MARKUP)]
    say(page, json.dumps([{"reasoning": "hm", "text_output": ""}, *script]))
    answer = page.locator("article.assistant")
    expect(answer).to_contain_text(f"Hello {MARKUP}")
    expect(answer.locator(".thought")).to_have_text("hm")
    expect(page.get_by_role("status")).to_contain_text("6 tokens, first after ")
    expect(page.get_by_label("Message")).to_be_focused()


def test_the_conversation_and_the_settings_are_sent(open_page: Open) -> None:
    page = open_page()
    expect(page.get_by_label("System prompt")).to_be_hidden()
    page.get_by_text("Settings").click()
    for label, text in (("System prompt", "Be kind."), ("Temperature", "0.5"), ("Most tokens", "7"), ("Seed", "3")):
        page.get_by_label(label).fill(text)
    say(page, json.dumps([{"text_output": "one"}]))
    expect(page.locator("article.assistant")).to_contain_text("one")
    say(page, "show")
    parameters = response_parameters(page, 2)
    assert [each["role"] for each in parameters["messages"]] == ["system", "user", "assistant", "user"]
    assert [each["content"] for each in parameters["messages"]][::2] == ["Be kind.", "one"]
    assert parameters["sampling_parameters"] == {"max_tokens": 7, "temperature": 0.5, "seed": 3}
    page.get_by_role("button", name="New chat").click()
    say(page, "show")
    assert [each["content"] for each in response_parameters(page, 1)["messages"]] == ["Be kind.", "show"]


@pytest.mark.parametrize("key_of_keyboard", ["Escape", ""])
def test_an_answer_can_be_stopped_and_the_model_is_cancelled(
    open_page: Open, models: Path, key_of_keyboard: str
) -> None:
    (models / "scripted/1/left").unlink(missing_ok=True)
    page = open_page()
    say(page, "wait")
    expect(page.locator("article.assistant")).to_contain_text("waiting")
    if key_of_keyboard:
        page.keyboard.press(key_of_keyboard)
    else:
        page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    while not (models / "scripted/1/left").exists():
        page.wait_for_timeout(10)


def test_a_failure_is_shown_and_the_question_is_restored(open_page: Open) -> None:
    page = open_page()
    script = json.dumps([{"error": "it broke"}])
    say(page, script)
    expect(page.get_by_role("status")).to_contain_text("it broke")
    expect(page.get_by_label("Message")).to_have_value(script)


def test_without_openai_routes_generate_stream_is_used(open_page: Open) -> None:
    page = open_page(has_openai=False)
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be kind.")
    say(page, "show")
    parameters = response_parameters(page, 1)
    assert [each["content"] for each in parameters["messages"]] == ["Be kind.", "show"]
    assert parameters["sampling_parameters"] == {"max_tokens": 512}
    page.get_by_label("Model").select_option("templated")  # has no input for messages
    with page.expect_request("**/generate_stream") as request_info:
        say(page, "again")
    prompt = f"Be kind.\n\nuser: show\n\nassistant: {json.dumps(parameters)}\n\nuser: again\n\nassistant:"
    assert json.loads(request_info.value.post_data or "")["text_input"] == prompt


def test_shift_enter_starts_a_line(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("Message").fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    expect(page.get_by_label("Message")).to_have_value("a\nb")
    expect(page.locator("article")).to_have_count(0)
