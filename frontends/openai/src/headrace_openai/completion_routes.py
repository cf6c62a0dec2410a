"""The answers of ``/v1/completions``: the text that follows a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace import HttpReply, HttpStream
from headrace_openai.body_members import flag, shown, whole
from headrace_openai.choices import MAX_CHOICES, Usage, numbered
from headrace_openai.completion_answers import CompletionChunks, CompletionText, TokenOffsets, completion_document
from headrace_openai.generation_route import GenerationRoute, TextCall, event_stream, text_request, wants_stream
from headrace_openai.openai_errors import BadMember
from headrace_openai.openai_route import json_answer
from headrace_openai.sampling_members import read_sampling_members
from headrace_openai.text_models import Prompt
from headrace_openai.text_responses import TextPart

_MOST_TOKEN = 2**31 - 1


class CompletionHandler(GenerationRoute):
    """Answers in the form of completions."""

    async def generate(self, call: TextCall) -> HttpReply | HttpStream:
        document = call.document
        stream, wants_usage = wants_stream(document)
        sampling = read_sampling_members(document, is_chat=False)
        if call.adapter:
            sampling["lora_name"] = call.adapter
        if document.get("suffix"):
            raise BadMember("suffix", "suffix is not supported: a model generates what follows the prompt")
        prompts = read_prompts(document)
        echoes = _echoes(document, prompts, sampling)
        each, top = _count(document, len(prompts)), sampling.get("logprobs", 0)
        parts = await self.parts(call, [text_request(call, prompt, sampling, stream) for prompt in prompts], each)
        if stream:
            chunks = CompletionChunks(call.named, wants_usage, top)
            return event_stream(call, _chunks(parts, echoes, each, chunks, wants_usage))
        texts, usage = [CompletionText(echoes[place // each], top) for place in range(len(parts))], Usage()
        async with aclosing(numbered(parts)) as arriving:  # type: ignore[type-var]
            async for number, part in arriving:
                usage.add(number // each, part)
                texts[number].add(part)
        return json_answer(completion_document(call.named, texts, usage), call.sent_as)


async def _chunks(
    parts: Sequence[AsyncIterator[TextPart]],
    echoes: Sequence[str],
    each: int,
    chunks: CompletionChunks,
    wants_usage: bool,
) -> AsyncIterator[bytes]:
    usage, begun, offsets = Usage(), set[int](), [TokenOffsets() for _ in parts]
    async with aclosing(numbered(parts)) as arriving:  # type: ignore[type-var]
        async for number, part in arriving:
            usage.add(number // each, part)
            printed = b""
            if number not in begun:
                begun.add(number)
                printed = chunks.print(number, TextPart(echoes[number // each]), offsets[number])
            printed += chunks.print(number, part, offsets[number])
            if printed:
                yield printed
    if wants_usage:
        yield chunks.print_usage(usage)


def _count(document: Mapping[str, Any], prompts: int) -> int:
    """Return the number of answers that ``document`` requests for each of its ``prompts``."""
    each = whole(document, "n", 1, MAX_CHOICES, 1)
    best_of = whole(document, "best_of", 1, MAX_CHOICES, each)
    if best_of != each:
        raise BadMember("best_of", f"best_of is {best_of}, and n is {each}: all answers are returned")
    if prompts * each > MAX_CHOICES:
        raise BadMember("prompt", f"the prompts and n make {prompts * each} answers, the limit is {MAX_CHOICES}")
    return each


def _echoes(document: Mapping[str, Any], prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> list[str]:
    """Return the text before the answers to each prompt."""
    if not flag(document, "echo"):
        return [""] * len(prompts)
    if "logprobs" in sampling:
        raise BadMember(
            "echo", "echo and logprobs exclude each other: a model reports no log probabilities of the prompt"
        )
    if any(prompt.text is None for prompt in prompts):
        raise BadMember("echo", "echo needs prompts of text, not of tokens")
    return [prompt.text or "" for prompt in prompts]


def read_prompts(document: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts: one of text, one of tokens, or an array of one of these kinds."""
    given = document.get("prompt")
    if type(given) is str:
        return [_text(given, "prompt")]
    if type(given) is not list or not given:
        raise BadMember("prompt", f"prompt must be a string, an array of strings, or tokens, got {shown(given)}")
    if type(given[0]) is int:
        return [_tokens(given, "prompt")]
    if len(given) > MAX_CHOICES:
        raise BadMember("prompt", f"prompt has {len(given)} prompts, the limit is {MAX_CHOICES}")
    return [
        _tokens(each, f"prompt[{place}]") if type(each) is list else _text(each, f"prompt[{place}]")
        for place, each in enumerate(given)
    ]


def _text(given: Any, where: str) -> Prompt:
    if type(given) is not str or not given:
        raise BadMember("prompt", f"{where} must be text or tokens, and not empty, got {shown(given)}")
    return Prompt(text=given)


def _tokens(given: Sequence[Any], where: str) -> Prompt:
    if not given:
        raise BadMember("prompt", f"{where} must have at least one token")
    if wrong := [each for each in given if type(each) is not int or not 0 <= each <= _MOST_TOKEN]:
        raise BadMember("prompt", f"{where} has the token {shown(wrong[0])}: a token is a whole number from 0")
    return Prompt(ids=given)
