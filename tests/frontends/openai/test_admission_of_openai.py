"""Keys and quotas on OpenAI's routes: the key is the client's ``api_key``, and a refusal has OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import openai
import pytest

from headrace_access import AccessOptions
from headrace_logging import AuditLogOptions
from headrace_openai import OpenAiOptions
from headrace_quotas import QuotaOptions
from headrace_testing.serving import serve
from tests.frontends.openai.model_files import write_models
from tests.frontends.openai.task_models import write_task_models
from tests.interceptors.access.access_files import make

RULE = {"models": ["emb*", "single", "story"], "operations": ["inference", "metadata"]}
CHAT = {"models": ["scripted"], "operations": ["inference"]}
#: An answer of ten tokens, in two parts.
TEN: Any = [
    {"role": "user", "content": json.dumps([{"text_output": "a", "num_output_tokens": number} for number in (1, 9)])}
]

Connect = Callable[[str], openai.OpenAI]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory, audit: Path) -> Iterator[Connect]:
    """Returns a client with the key of a principal; with a wrong key for others."""
    folder = tmp_path_factory.mktemp("admission")
    keys = make(
        folder / "access.json",
        alice=[RULE],
        bob=[RULE],
        dora=[RULE],
        erin=[RULE],
        carol=[],
        dave=[CHAT],
        emma=[CHAT],
        gina=[CHAT],
        fred=[RULE],
        hank=[RULE],
    )
    dora = {"models": {"story": {"in_flight": 1}}}
    erin = {"models": {"story": {"output_tokens_per_minute": 1, "output_tokens_burst": 8}}}
    bob = {"in_flight": 1, "requests_per_second": 0.01, "burst": 2}
    tokens = {"output_tokens_per_minute": 1, "output_tokens_burst": 15}
    dave = {"models": {"scripted": tokens}}
    quotas = {
        "principals": {
            "bob": bob,
            "dora": dora,
            "erin": erin,
            "dave": dave,
            "emma": tokens,
            "hank": {"models": {"story": {"requests_per_second": 4, "burst": 1}}},
            "fred": {"models": {"single": {"requests_per_second": 0.01, "burst": 1}}},
        }
    }
    (folder / "quotas.json").write_text(json.dumps(quotas))
    groups = [
        AccessOptions(keys=str(folder / "access.json")),
        QuotaOptions(file=str(folder / "quotas.json")),
        OpenAiOptions(image_hosts="images.example"),
        AuditLogOptions(file=str(audit), format="json"),
    ]
    clients: list[openai.OpenAI] = []
    models = write_models(write_task_models(folder / "models"))
    with serve(models, plugin_options=groups, listen=True) as server:

        def connect(name: str) -> openai.OpenAI:
            url = f"http://127.0.0.1:{server.options.http_port}/v1"
            clients.append(openai.OpenAI(base_url=url, api_key=keys.get(name, "hr_no_key"), max_retries=0))
            return clients[-1]

        yield connect
        for client in clients:
            client.close()


def test_a_key_of_some_models_asks_these(connect: Connect) -> None:
    alice = connect("alice")
    assert alice.embeddings.create(model="embed", input="a").data[0].embedding == [1, 0, 0, 0]
    with pytest.raises(openai.PermissionDeniedError, match="'alice' may not do 'infer' on model 'rerank'") as refused:
        alice.embeddings.create(model="rerank", input="a")
    assert refused.value.code == "permission_denied"
    with pytest.raises(openai.PermissionDeniedError, match="'nobody'"):  # as if there were such a model
        alice.embeddings.create(model="nobody", input="a")


def test_a_wrong_key_and_one_without_rules_are_refused(connect: Connect) -> None:
    with pytest.raises(openai.AuthenticationError, match="the key is refused") as refused:
        connect("mallory").embeddings.create(model="embed", input="a")
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError, match="'carol' may not do 'embeddings'"):
        connect("carol").embeddings.create(model="embed", input="a")


def test_a_request_is_one_inference_of_a_quota_whatever_number_of_texts_it_has(connect: Connect) -> None:
    bob = connect("bob")
    for model in ("embed", "single"):
        assert len(bob.embeddings.create(model=model, input=["a"] * 100).data) == 100
    with pytest.raises(openai.RateLimitError, match="'bob'") as refused:
        bob.embeddings.create(model="embed", input="a")
    assert len(connect("fred").embeddings.create(model="single", input=["a"] * 100).data) == 100
    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) > 10


def test_a_client_that_repeats_what_is_refused_waits_as_long_as_it_is_told(connect: Connect) -> None:
    hank: Any = connect("hank")
    asked: Any = {"model": "story", "prompt": "a", "extra_headers": {"x-request-id": "mine"}}
    assert hank.completions.create(**asked)._request_id == "mine"
    with pytest.raises(openai.RateLimitError) as refused:
        hank.completions.create(**asked)
    assert (refused.value.request_id, refused.value.response.headers["retry-after"]) == ("mine", "1")
    begun = monotonic()
    answer = hank.with_options(max_retries=1).completions.create(**asked)
    assert (answer.choices[0].text, answer._request_id) == (" a", "mine")
    assert monotonic() - begun > 0.9, "it was not told to wait"


def test_a_chat_is_admitted_for_its_model(connect: Connect) -> None:
    alice: Any = connect("alice")
    messages = [{"role": "user", "content": "a"}]
    for stream in (False, True):
        answer = alice.chat.completions.create(model="story", messages=messages, stream=stream, n=2)
        assert len(list(answer) if stream else answer.choices) == (10 if stream else 2)
        for model in ("scripted", "nobody"):
            with pytest.raises(openai.PermissionDeniedError, match=f"'alice' may not do 'infer' on model '{model}'"):
                alice.chat.completions.create(model=model, messages=messages, stream=stream)


def test_each_choice_is_one_inference_of_its_model(connect: Connect) -> None:
    dora = connect("dora")
    for _ in range(3):
        with pytest.raises(openai.RateLimitError, match="'dora' with model 'story'"):
            dora.completions.create(model="story", prompt="a b c", n=2)
        assert dora.completions.create(model="story", prompt="a b c").choices[0].text == " a b c"


def test_the_tokens_of_a_chat_are_counted(connect: Connect) -> None:
    """A response of this model counts as one token."""
    erin = connect("erin")
    for _ in range(2):
        assert erin.completions.create(model="story", prompt="a b c d e").choices[0].text == " a b c d e"
    with pytest.raises(openai.RateLimitError, match="'erin' with model 'story'"):
        erin.completions.create(model="story", prompt="a")


@pytest.mark.parametrize("name", ["dave", "emma"])
def test_a_quota_of_tokens_ends_chats_whole_or_streamed(connect: Connect, name: str) -> None:
    client = connect(name)
    whole = client.chat.completions.create(model="scripted", messages=TEN)
    assert whole.choices[0].message.content == "aa"
    stream = client.chat.completions.create(model="scripted", messages=TEN, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == "aa"  # 20 of 15 tokens: what is left pays
    for streams in (True, False):
        with pytest.raises(openai.RateLimitError, match="tokens") as refused:
            client.chat.completions.create(model="scripted", messages=TEN, stream=streams)
        assert int(refused.value.response.headers["retry-after"]) > 60


def test_an_image_is_fetched_from_hosts_of_the_flag_only(connect: Connect) -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    with pytest.raises(openai.BadRequestError, match=r"--openai-image-hosts does not name '127.0.0.1' with port 80"):
        connect("gina").chat.completions.create(model="scripted", messages=[{"role": "user", "content": [image]}])


def test_a_key_lists_the_models_that_it_may_see(
    connect: Connect, audit: Path, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    alice = connect("alice")
    assert {model.id for model in alice.models.list()} == {"embed", "single", "story"}
    with pytest.raises(openai.PermissionDeniedError, match="'carol' may not do 'openai_models'"):
        connect("carol").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="on model 'listen'"):
        alice.models.retrieve("listen")
    wait_until(lambda: '"listen"' in audit.read_text(), "the refusal is in the audit log")
    assert "model_metadata" not in audit.read_text()  # what a list leaves out is no attempt
