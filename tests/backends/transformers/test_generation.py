"""Text generation, with transformers' own ``generate`` as the oracle, token by token."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import BackendError, InvalidArgument, Unsupported
from headrace_llm import read_logprobs, token_bytes
from headrace_llm.engine_kit import check_engine
from headrace_transformers import chat, generation
from headrace_transformers.continuous import ContinuousEngine
from headrace_transformers.generation_job import GenerationJob
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Given, Loop

PROMPTS = ["The quick brown fox", "naïve", "one two three four five six seven", "{", "x" * 40, "é"]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
#: Models that have no continuous batching, by the log.
ONE_BY_ONE: set[str] = set()
READ = "{% include '/etc/hostname' %}"
#: Programs in templates, by the message that starts each.
BAD = {
    "loops": LOOP,
    "raises": "{{ raise_exception('roles must alternate') }}",
    "reads": READ,
    "allocates": "{{ ('x' * 10**9) | length }}",
}
TEMPLATES = {
    "bad": "".join(
        f"{{% if messages[0].content == '{name}' %}}{program}{{% endif %}}" for name, program in BAD.items()
    ),
    "tools": "{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools[0].name | tojson }}",
    "none": "",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("generation")
    write_model(path, "chat", tiny_models.llama, max_running="8")
    write_model(path, "single", tiny_models.llama, continuous_batching="false")
    write_model(path, "careful", partial(tiny_models.llama, repetition_penalty=1.5, eos_token_id=[1, 7]))
    write_model(path, "mamba", tiny_models.mamba)
    write_model(path, "t5", tiny_models.t5)
    write_model(path, "gguf", tiny_models.gguf)
    write_model(path, "small", tiny_models.llama, cache_tokens="256")
    write_model(path, "long", partial(tiny_models.llama, context=2048))
    for name, template in TEMPLATES.items():
        write_model(path, name, partial(tiny_models.llama, template=template))
    return path


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], repository: Path) -> Loop:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generation.log, "warning", lambda text, name, *_: ONE_BY_ONE.add(name))
        return start_server(repository)


class Oracle:
    """transformers, in this process, on the same files."""

    def __init__(self, folder: Path) -> None:
        source = {"gguf_file": "tiny.gguf"} if (folder / "tiny.gguf").exists() else {}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
        kind = transformers.AutoModelForSeq2SeqLM if "t5" in str(folder) else transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, **source).eval()

    def generate(self, prompt: str | list[int], seed: int | None = None, **options: Any) -> list[int]:
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        given = torch.tensor([ids])
        if seed is not None:
            torch.manual_seed(seed)
        made: list[int] = self.model.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()
        begin = 1 if self.model.config.is_encoder_decoder else len(ids)
        return made[begin:]


@pytest.fixture(scope="module")
def oracle(repository: Path) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}
    return lambda name: made.setdefault(name, Oracle(repository / name / "1"))


def test_continuous_batching_starts_where_the_model_has_it(loop: Loop) -> None:
    assert {"mamba"} == ONE_BY_ONE


@pytest.mark.parametrize("model", ["chat", "single", "careful", "mamba", "t5", "small", "gguf"])
def test_greedy_tokens_are_those_of_generate(loop: Loop, oracle: Callable[[str], Oracle], model: str) -> None:
    async def ask_all() -> list[Given]:
        sampling = {"temperature": 0, "max_tokens": 24}
        return await asyncio.gather(*[loop.ask(model, prompt, "stream", sampling=sampling) for prompt in PROMPTS])

    for prompt, given in zip(PROMPTS, loop.run(ask_all()), strict=True):
        theirs = oracle(model)
        expected = theirs.generate(prompt, do_sample=False, max_new_tokens=24)
        assert given.ids == expected
        text = [token for token in expected if token not in (1, 7) or model != "careful"]  # these end it
        decoded = theirs.tokenizer.decode(text, skip_special_tokens=True)
        assert given.text == decoded.rstrip("\ufffd")  # but for a character that is not complete
        assert given.reason == ("stop" if len(expected) < 24 else "length")


@pytest.mark.parametrize("model", ["chat", "single"])
def test_an_engine_keeps_the_contract(loop: Loop, model: str) -> None:
    check = check_engine(loop.server, model, prompt="The quick", sampling={"ignore_eos": True})
    loop.run(check)


SAMPLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7, "top_k": 0}),
    ({"temperature": 1.3, "top_k": 20}, {"do_sample": True, "temperature": 1.3, "top_k": 20}),
    ({"temperature": 1, "top_p": 0.6}, {"do_sample": True, "top_p": 0.6, "top_k": 0}),
    ({"temperature": 1, "min_p": 0.05}, {"do_sample": True, "min_p": 0.05, "top_k": 0}),
    ({"temperature": 0, "repetition_penalty": 1.8}, {"do_sample": False, "repetition_penalty": 1.8}),
    ({"temperature": 0, "logit_bias": {"65": 9}}, {"do_sample": False, "sequence_bias": [[[65], 9.0]]}),
    ({"temperature": 0, "min_tokens": 20}, {"do_sample": False, "min_new_tokens": 20}),
]


@pytest.mark.parametrize("model", ["chat", "single"])
@pytest.mark.parametrize(("asked", "theirs"), SAMPLINGS, ids=str)
def test_sampled_tokens_are_those_of_generate(
    loop: Loop, oracle: Callable[[str], Oracle], model: str, asked: dict[str, Any], theirs: dict[str, Any]
) -> None:
    async def ask() -> Given:
        noise = [loop.ask(model, PROMPTS[place], sampling={"temperature": 1}) for place in range(3)]
        sampling = {**asked, "seed": 7, "max_tokens": 20}
        return (await asyncio.gather(loop.ask(model, "The quick", sampling=sampling), *noise))[0]

    expected = oracle(model).generate("The quick", seed=7, max_new_tokens=20, **theirs)
    assert loop.run(ask()).ids == expected


def test_without_a_seed_two_answers_differ(loop: Loop) -> None:
    sampling = {"temperature": 1, "max_tokens": 24}
    first, second = (loop.run(loop.ask("chat", "The quick", sampling=sampling)) for _ in range(2))
    assert first.ids != second.ids


@pytest.mark.parametrize("model", ["chat", "single"])
def test_log_probabilities_are_those_of_a_forward_pass(loop: Loop, oracle: Callable[[str], Oracle], model: str) -> None:
    flags = ("return_logprobs", "return_cumulative_logprob")
    given = loop.run(loop.ask(model, "The quick", *flags, sampling={"logprobs": 3, "max_tokens": 6}))
    theirs, prompt = oracle(model), oracle(model).tokenizer("The quick").input_ids
    with torch.inference_mode():
        scores = theirs.model(torch.tensor([prompt + given.ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    logprobs = read_logprobs(given.string("logprobs"))
    assert [each.id for each in logprobs] == given.ids
    for each, row in zip(logprobs, scores, strict=True):
        values, ids = row.topk(3)
        assert [token for token, _, _ in each.top] == ids.tolist()
        assert [value for _, _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)
    total = sum(float(scores[place, token]) for place, token in enumerate(given.ids))
    assert np.asarray(given.responses[-1].outputs["cumulative_logprob"]).item() == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize(("piece", "texts"), [("\u00f0", [b"\xf0"] * 2), ("</s>", [])])
def test_log_probabilities_have_the_bytes_of_the_text(
    loop: Loop, oracle: Callable[[str], Oracle], piece: str, texts: list[bytes]
) -> None:
    """The first byte of a character of four; and the token that ends the text, which is not of it."""
    token = oracle("chat").tokenizer.convert_tokens_to_ids(piece)
    sampling = {"logit_bias": {str(token): 100}, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    given = loop.run(loop.ask("chat", "x", "return_logprobs", sampling=sampling))
    assert set(given.ids) == {token}
    assert [token_bytes(each.text) for each in read_logprobs(given.string("logprobs"))] == texts


def test_penalties_keep_tokens_from_coming_again(loop: Loop) -> None:
    sampling = {"presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 30, "ignore_eos": True}
    plain = loop.run(loop.ask("chat", "xxxx", sampling={"max_tokens": 30, "ignore_eos": True}))
    given = loop.run(loop.ask("chat", "xxxx", sampling=sampling))
    assert len(set(given.ids)) >= len(set(plain.ids))
    assert given.ids != plain.ids or len(set(plain.ids)) == 30


# ------------------------------------------------------------------------------------ chats


def test_a_chat_is_the_prompt_of_the_models_template(loop: Loop, oracle: Callable[[str], Oracle]) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    given = loop.run(loop.ask("chat", messages, sampling={"temperature": 0, "max_tokens": 10}))
    prompt = oracle("chat").tokenizer("<|system|>be<|user|>hi<|assistant|>", add_special_tokens=False).input_ids
    assert given.ids == oracle("chat").generate(prompt, do_sample=False, max_new_tokens=10)


def test_a_template_gets_tools_and_special_tokens(loop: Loop, oracle: Callable[[str], Oracle]) -> None:
    messages, tools = [{"role": "user", "content": "hi é\n"}], [{"name": "é"}]
    given = loop.run(loop.ask("tools", messages, tools=tools, sampling={"temperature": 0, "max_tokens": 10}))
    tokenizer = oracle("tools").tokenizer
    prompt = tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
    assert prompt == '<s>hi é\n"é"'
    prompt = tokenizer(prompt, add_special_tokens=False).input_ids
    assert given.ids == oracle("tools").generate(prompt, do_sample=False, max_new_tokens=10)


def test_a_chat_ends_at_the_latest_where_the_context_does(loop: Loop) -> None:
    given = loop.run(loop.ask("chat", [{"role": "user", "content": "hi"}], "return_num_input_tokens",
                              sampling={"ignore_eos": True}))  # fmt: skip
    tokens = np.asarray(given.responses[0].outputs["num_input_tokens"]).item() + len(given.ids)
    assert (tokens, given.reason) == (128, "length")


@pytest.mark.parametrize(
    ("model", "text", "why"),
    [
        ("bad", "loops", "took more than 0.5 s"),
        ("bad", "raises", "roles must alternate"),
        ("bad", "reads", "the chat template failed for these messages: TypeError: no loader"),
        ("bad", "allocates", "the chat template failed for these messages: MemoryError"),
        ("none", "hi", "this model has no chat template: send text_input"),
    ],
)
def test_a_bad_template_refuses_its_chats_and_nothing_else(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, model: str, text: str, why: str
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_S", 0.5)
    with pytest.raises(InvalidArgument, match=why):
        loop.run(loop.ask(model, [{"role": "user", "content": text}]))
    assert loop.run(loop.ask(model, "The quick", sampling={"max_tokens": 2})).ids


@pytest.mark.parametrize(
    ("prompt", "inputs", "error", "why"),
    [
        ([{"content": "hi"}], {}, InvalidArgument, "a message must have a role"),
        ([{"role": "user", "content": 7}], {}, InvalidArgument, "must be text or parts, got 7"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, InvalidArgument, "a part of type 'image_url'"),
        ("hi", {"sampling": {"lora_name": "x"}}, InvalidArgument, "lora_name is 'x', but this model has no adapters"),
        ("hi", {"sampling": {"best_of": 2}}, InvalidArgument, "the member 'best_of', which this engine does not have"),
        ("hi", {"sampling": {"logit_bias": {"340": 1}}}, InvalidArgument, "logit_bias has the token 340"),
        ("hi", {"tools": [{}], "tool_choice": "required"}, Unsupported, "tool_choice must be auto or none"),
        ([339, 340], {}, InvalidArgument, "has the token 340, the vocabulary of this model ends at 339"),
        ("x" * 4000, {}, InvalidArgument, "the prompt has .* the limit of this model"),
        ([5] * 128, {}, InvalidArgument, "the prompt has 128 tokens, the limit of this model is 127"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    loop: Loop, prompt: Any, inputs: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        loop.run(loop.ask("chat", prompt, **inputs))


# ------------------------------------------------------------------------------------ structured outputs

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["chat", "single"])
def test_a_text_matches_its_constraint(loop: Loop, model: str) -> None:
    async def ask() -> list[Given]:
        kinds: list[dict[str, Any]] = [
            {"json": SCHEMA},
            {"regex": "[a-c]{3}-[0-9]{2}"},
            {"choice": ["red", "green", 'a "b"']},
            {"grammar": 'start: "<" /[xy]{4}/ ">"'},
        ]
        samplings = [{"structured_outputs": kind, "temperature": 1, "seed": 7, "max_tokens": 60} for kind in kinds]
        return await asyncio.gather(*[loop.ask(model, "The quick", sampling=each) for each in samplings])

    document, regex, choice, grammar = loop.run(ask())
    assert {document.reason, regex.reason, choice.reason, grammar.reason} == {"stop"}
    made = json.loads(document.text)
    assert set(made) == {"n", "ok"}
    assert 1 <= made["n"] <= 99
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", regex.text)
    assert choice.text in ("red", "green", 'a "b"')
    assert re.fullmatch("<[xy]{4}>", grammar.text)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"json": {"type": "no such type"}}, "structured_outputs.json cannot be used"),
        ({"regex": "(a"}, "structured_outputs.regex cannot be used"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar cannot be used"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_used_is_refused(loop: Loop, constraint: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        loop.run(loop.ask("chat", "hi", sampling={"structured_outputs": constraint}), 5)


def test_a_catastrophic_pattern_takes_no_time(loop: Loop) -> None:
    sampling = {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}b"}, "max_tokens": 8}
    try:
        assert set(loop.run(loop.ask("chat", "hi", sampling=sampling), 5).text) <= {"a", "b"}
    except InvalidArgument as error:
        assert "structured_outputs" in str(error)  # noqa: PT017 (either is right)


def test_the_prompt_is_counted_before_its_first_token(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota charges it to a caller that leaves meanwhile. It is computed in two steps (``max_batch_tokens``)."""
    begun, go, forward = threading.Event(), threading.Event(), transformers.LlamaForCausalLM.forward

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        go.wait(30)
        return forward(self, *args, **kwargs)

    def counted() -> float:
        families = {family.name: family.samples for family in loop.server.engine.collect()}
        return sum(each.value for each in families["nv_llm_input_tokens"] if each.labels["model"] == "long")

    async def ask() -> None:
        before = counted()
        task = asyncio.ensure_future(loop.ask("long", [3] * 1500, sampling={"max_tokens": 1}))
        await asyncio.to_thread(begun.wait, 30)
        while not task.done() and counted() < before + 1500:
            await asyncio.sleep(0.01)
        assert not task.done()
        go.set()
        await task

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", wait)
    try:
        loop.run(ask(), 10)
    finally:
        go.set()


# ------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("model", ["chat", "single"])
def test_an_engine_that_breaks_tells_every_caller_and_goes_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    forward = transformers.LlamaForCausalLM.forward
    calls = 0

    def break_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("the device is gone")
        return forward(self, *args, **kwargs)

    async def ask_all() -> list[Given | BaseException]:
        asked = [loop.ask(model, "The quick", sampling={"max_tokens": 50, "ignore_eos": True}) for _ in range(16)]
        return await asyncio.gather(*asked, return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(transformers.LlamaForCausalLM, "forward", break_once)
        answers = loop.run(ask_all())
    assert all(isinstance(each, BackendError) and "the device is gone" in str(each) for each in answers)

    again = loop.ask(model, "The quick", sampling={"max_tokens": 4, "ignore_eos": True})
    assert loop.run(again).reason == "length"


def test_requests_that_arrive_while_the_loop_breaks_are_given_to_the_next_one(
    loop: Loop, oracle: Callable[[str], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request is in the loop, three are submitted before it ends, and one while it ends."""
    begun, broken, forward = threading.Event(), threading.Event(), transformers.LlamaForCausalLM.forward
    breaks, submit, submitted = iter([True]), ContinuousEngine.submit, queue.SimpleQueue[str]()

    def break_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(breaks, False):
            begun.set()
            assert broken.wait(30)
            raise RuntimeError("the device is gone")
        return forward(self, *args, **kwargs)

    def note(self: ContinuousEngine, job: GenerationJob) -> str:
        name = submit(self, job)
        submitted.put(name)
        return name

    async def ask_all() -> list[Given | BaseException]:
        sampling = {"temperature": 0, "max_tokens": 12}
        first = asyncio.ensure_future(loop.ask("chat", PROMPTS[0], sampling=sampling))
        await asyncio.to_thread(begun.wait, 30)
        later = [asyncio.ensure_future(loop.ask("chat", each, sampling=sampling)) for each in PROMPTS[1:4]]
        for _ in range(4):
            await asyncio.to_thread(submitted.get, True, 30)
        broken.set()
        return await asyncio.gather(first, *later, loop.ask("chat", PROMPTS[4], sampling=sampling),
                                    return_exceptions=True)  # fmt: skip

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", break_once)
    monkeypatch.setattr(ContinuousEngine, "submit", note)
    first, *later = loop.run(ask_all())
    assert "the device is gone" in str(first)
    for prompt, given in zip(PROMPTS[1:5], later, strict=True):
        assert isinstance(given, Given), given
        assert given.ids == oracle("chat").generate(prompt, do_sample=False, max_new_tokens=12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("continuous", ["true", "false"])
def test_greedy_tokens_on_a_gpu_are_those_of_generate_on_it(
    tmp_path: Path, start_server: Callable[..., Loop], write_model: Callable[..., Path], continuous: str
) -> None:
    options = {"kind": "KIND_GPU", "continuous_batching": continuous, "cache_tokens": "4096"}
    folder = write_model(tmp_path, "gpu", tiny_models.llama, **options)
    loop, theirs = start_server(tmp_path), Oracle(folder)
    theirs.model.to("cuda:0")
    given = loop.run(loop.ask("gpu", "The quick", sampling={"temperature": 0, "max_tokens": 12}))
    ids = torch.tensor([theirs.tokenizer("The quick").input_ids], device="cuda:0")
    made = theirs.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert given.ids == made[0].tolist()[ids.shape[1] :]
