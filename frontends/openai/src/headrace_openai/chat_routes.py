"""The answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from headrace import HttpReply, HttpStream
from headrace_openai.body_members import encoded, encoded_in_parts, members, whole
from headrace_openai.chat_answers import ChatChoice, ChatChunks, ChatText, chat_document
from headrace_openai.chat_messages import images_in, read_messages
from headrace_openai.chat_templates import plain_prompt
from headrace_openai.choices import MAX_CHOICES, Usage, numbered
from headrace_openai.generation_route import GenerationRoute, TextCall, event_stream, text_request, wants_stream
from headrace_openai.openai_errors import BadMember
from headrace_openai.openai_route import json_answer, off_loop
from headrace_openai.sampling_members import read_sampling_members
from headrace_openai.text_models import Prompt
from headrace_openai.text_responses import TextPart
from headrace_openai.tool_choices import ToolPlan, plan_tools, shown_tools

#: The most tokens of a chat for a model that gets a prompt. The default for prompts, 16, is too short for a chat.
_MOST_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Chat:
    """The answers to a chat while they arrive."""

    parts: Sequence[AsyncIterator[TextPart]]
    choices: Sequence[ChatChoice]
    top_logprobs: int


class ChatRoute(GenerationRoute):
    """A route to the next message of a chat."""

    async def begin(self, call: TextCall, count: int, stream: bool) -> Chat:
        """Return ``count`` answers to ``call``, whose body is a chat completion. Raises `BadMember`."""
        sampling = read_sampling_members(call.document, is_chat=True)
        if call.adapter:
            sampling["lora_name"] = call.adapter
        plan = plan_tools(call.document, call.model)
        if plan.constraint:
            if "structured_outputs" in sampling:
                raise BadMember("tool_choice", "a tool that must be called and response_format are two constraints")
            sampling["structured_outputs"] = plan.constraint
        if await self.extension.images.replace(call.document.get("messages")):
            call = replace(call, is_small=False)
        prompt = await self._prompt(call, plan, sampling)
        del call.document["messages"]  # an answer may take minutes, and needs no large texts
        parts = await self.parts(call, [text_request(call, prompt, sampling, stream)], count)
        choices = [ChatChoice(plan.parser() if plan.parser else None, plan.has_one_call) for _ in parts]
        return Chat(parts, choices, sampling.get("logprobs", 0))

    async def _prompt(self, call: TextCall, plan: ToolPlan, sampling: dict[str, Any]) -> Prompt:
        """Return the prompt for the model: the messages, or what its template makes of them."""
        document, model = call.document, call.model
        if document.get("chat_template") is not None:
            raise BadMember("chat_template", "chat_template is the model's: a request can not have another one")
        (tools, choice), encode = plan.inputs, encoded if call.is_small else encoded_in_parts
        if "messages" in model.inputs:
            given = await off_loop(
                self.engine, call.is_small, lambda: encode(shown_tools(plan, read_messages(document)), "messages")
            )
            return Prompt(messages=given, tools=tools, tool_choice=choice)
        messages = await off_loop(self.engine, call.is_small, lambda: read_messages(document))
        more = members(document, "chat_template_kwargs", "chat_template_kwargs")
        sampling.pop("chat_template_kwargs", None)
        if model.template is not None:
            text = await model.template.render(messages, plan.tools, more)
        elif more:
            raise BadMember("chat_template_kwargs", f"model '{model.name}' has no chat_template")
        else:
            text = await off_loop(self.engine, call.is_small, lambda: plain_prompt(messages))
        images = await off_loop(self.engine, call.is_small, lambda: images_in(messages))
        sampling.setdefault("max_tokens", _MOST_TOKENS)
        return Prompt(text=text, images=images, tools=tools, tool_choice=choice)


class ChatHandler(ChatRoute):
    """Answers in the form of chat completions."""

    async def generate(self, call: TextCall) -> HttpReply | HttpStream:
        stream, wants_usage = wants_stream(call.document)
        count = whole(call.document, "n", 1, MAX_CHOICES, 1)
        chat = await self.begin(call, count, stream)
        if stream:
            chunks = ChatChunks(call.named, wants_usage, chat.top_logprobs)
            return event_stream(call, _chunks(chat, chunks, wants_usage))
        texts, usage = [ChatText(chat.top_logprobs) for _ in chat.choices], Usage()
        async with aclosing(numbered(chat.parts)) as arriving:  # type: ignore[type-var]
            async for number, part in arriving:
                usage.add(0, part)
                texts[number].add(chat.choices[number].take(part))
        return json_answer(chat_document(call.named, texts, usage), call.sent_as)


async def _chunks(chat: Chat, chunks: ChatChunks, wants_usage: bool) -> AsyncIterator[bytes]:
    usage = Usage()
    async with aclosing(numbered(chat.parts)) as arriving:  # type: ignore[type-var]
        async for number, part in arriving:
            usage.add(0, part)
            choice = chat.choices[number]
            if printed := chunks.print(number, choice, choice.take(part)):
                yield printed
    if wants_usage:
        yield chunks.print_usage(usage)
