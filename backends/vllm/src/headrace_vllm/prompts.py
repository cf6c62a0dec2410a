"""From requests to vLLM's prompts: text, tokens, images, and chats by the model's template and parsers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from headrace import InvalidArgument, LoadError, Model, Unsupported, one_line
from headrace_llm import IMAGE_FORMS, GenerationRequest, ImageBudget, base64_of, image_size
from headrace_vllm.output_reader import DeltaReader, partial_text
from headrace_vllm.sampling_parameters import template_arguments

#: An image of one pixel, a PPM: vLLM decodes this form, but its size is not read before.
_UNBOUNDED_IMAGE: Final = b"P6 1 1 255\n\0\0\0"
#: Members of a part of a message that hold an address.
_ADDRESSES: Final = ("audio_url", "file", "image_url", "video_url")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """``rendered`` is vLLM's form of a prompt, ``more`` further arguments of ``AsyncLLM.generate``."""

    rendered: Any
    reader: DeltaReader
    more: Mapping[str, Any] = field(default_factory=dict)


class PromptRenderer:
    """Renders the prompts of one ``AsyncLLM``. On its loop.

    Raises `LoadError` if the model's parameters name a template or a parser that cannot be used.
    """

    def __init__(self, client: Any, model: Model) -> None:
        from vllm.renderers.online_renderer import OnlineRenderer

        decode_bounded_forms_only()
        parameters = model.parameters
        self._name, self._config, self._renderer = model.name, client.model_config, client.renderer
        self._partial_text = lru_cache(1 << 16)(partial(partial_text, client.renderer.tokenizer))
        self._has_tool_parser = bool(parameters.tool_parser)
        self._allows_addresses = bool(client.vllm_config.model_config.allowed_media_domains)
        try:
            self._online = OnlineRenderer(
                client.model_config,
                client.renderer,
                request_logger=None,
                chat_template=template_text(model),
                chat_template_content_format="auto",
                enable_auto_tools=self._has_tool_parser,
                tool_parser=parameters.tool_parser or None,
                reasoning_parser=parameters.reasoning_parser or None,
            )
        except (TypeError, KeyError, ValueError) as error:
            raise LoadError(f"model '{model.name}': {one_line(str(error))}") from error

    async def render(self, request: GenerationRequest, sampling: Any) -> RenderedPrompt:
        """Return the prompt of ``request``. ``sampling``, its ``SamplingParams``, gets the settings of its chat.

        Raises `InvalidArgument`, and vLLM's errors.
        """
        if request.messages is not None:
            return await self._chat(request, sampling)
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.input_ids)} if request.input_ids else {}
        if request.text is not None:
            prompt["prompt"] = request.text
        if request.images:
            if not self._config.is_multimodal_model:
                raise InvalidArgument(f"model '{self._name}' takes no images")
            await asyncio.to_thread(ImageBudget().take, request.images)
            images = await asyncio.to_thread(lambda: [_image(each) for each in request.images])
            prompt["multi_modal_data"] = {"image": images}
        try:
            (rendered,) = await self._renderer.render_cmpl_async([parse_model_prompt(self._config, prompt)])
        except AssertionError as error:
            if not request.images:
                raise
            # vLLM asserts that it finds the place of each image.
            raise InvalidArgument(
                f"the prompt needs the model's token for images once for each of {len(request.images)} images: "
                f"{one_line(str(error))[:200]}"
            ) from error
        return RenderedPrompt(rendered, DeltaReader(sampling.logprobs, self._partial_text))

    async def _chat(self, request: GenerationRequest, sampling: Any) -> RenderedPrompt:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._check_addresses(request)
        if next(media_in(request.messages or ()), None) is not None:
            await asyncio.to_thread(check_media, request.messages)
        asked: dict[str, Any] = {
            "messages": request.messages,
            "structured_outputs": sampling.structured_outputs,
            "skip_special_tokens": sampling.skip_special_tokens,
            "chat_template_kwargs": template_arguments(request),
            "stream": True,
        }
        if request.tools:
            if not self._has_tool_parser and request.tool_choice != "none":
                raise Unsupported(
                    f"model '{self._name}' has no parser of tool calls: set the parameter tool_parser in its config, "
                    "such as to hermes"
                )
            asked["tools"] = request.tools
        if request.tool_choice is not None:
            asked["tool_choice"] = request.tool_choice
        try:
            chat = ChatCompletionRequest(**asked)
        except ValueError as error:
            raise InvalidArgument(f"the chat is not valid: {_first_problem(error)}") from error
        rendered = await self._online.render_chat(chat)
        if not isinstance(rendered, tuple):
            raise InvalidArgument(one_line(rendered.error.message))
        _, (engine_input,) = rendered
        sampling.structured_outputs = chat.extract_structured_outputs()
        sampling.skip_special_tokens = chat.skip_special_tokens
        if self._online.parser is None:
            return RenderedPrompt(engine_input, DeltaReader(sampling.logprobs, self._partial_text))
        arguments = self._online.effective_chat_template_kwargs(chat)
        parser = self._online.parser(
            self._renderer.tokenizer, chat.tools, chat_template_kwargs=arguments, model_config=self._config
        )
        more: dict[str, Any] = {
            "reasoning_ended": chat.resolve_reasoning_ended(parser, engine_input.get("prompt_token_ids") or [])
        }
        if parser.reasoning_parser is not None:
            more["reasoning_parser_kwargs"] = {"chat_template_kwargs": arguments}
        return RenderedPrompt(engine_input, DeltaReader(sampling.logprobs, self._partial_text, parser, chat), more)

    def _check_addresses(self, request: GenerationRequest) -> None:
        """Raise `InvalidArgument` for an address that vLLM would fetch, unless the model's arguments name the hosts."""
        if not self._allows_addresses:
            for _, address in addresses_in(request.messages or ()):
                if urlsplit(address).scheme != "data":
                    raise InvalidArgument(
                        f"a message has the address '{one_line(address)[:100]}': only data: is allowed. To fetch from "
                        "other hosts, name them in allowed_media_domains of model.json"
                    )


def addresses_in(messages: Any) -> Iterator[tuple[str, str]]:
    """Yield the addresses in ``messages`` at any depth, each after the name of its member, such as ``image_url``.

    An address is a string, or the member ``url`` of an object. The name is ``url`` if no known member has the object.
    """
    waiting = [("", message) for message in reversed(messages)]
    while waiting:
        member, value = waiting.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if name == "url" and isinstance(inner, str):
                    yield member or name, inner
                elif name in _ADDRESSES and isinstance(inner, str):
                    yield name, inner
                else:
                    waiting.append((name if name in _ADDRESSES else "", inner))
        elif isinstance(value, list):
            waiting += [("", each) for each in reversed(value)]


def media_in(messages: Any) -> Iterator[tuple[str, str]]:
    """Yield the files in the data URLs of images and videos in ``messages``, as vLLM reads them.

    Each is its kind and its base64. The kind is ``image`` in an ``image_url``, and the type of its URL in a
    ``video_url``, such as ``video/jpeg``. A data URL without base64 is left to vLLM, which refuses it.
    """
    for member, address in addresses_in(messages):
        if member in ("image_url", "video_url") and (text := base64_of(address)) is not None:
            yield "image" if member == "image_url" else address[5:200].partition(";")[0].lower(), text


def check_media(messages: Any) -> None:
    """Raise `InvalidArgument` if the images in the data URLs of ``messages`` are too many, too large or no images.

    vLLM decodes the file of an ``image_url`` as an image, whatever type the URL names. It decodes the frames of a video
    of the type video/jpeg as images, too. Another video counts if it begins as an image, such as GIF; if not, its size
    is not known here.
    """
    media, budget = list(media_in(messages)), ImageBudget()
    budget.take(text for kind, text in media if kind == "image")
    for kind, text in media:
        if kind == "video/jpeg":
            budget.take(text.split(","), "video frame", most=None)
        elif kind != "image" and _is_image(text):
            budget.take([text], "video", most=None)


def decode_bounded_forms_only() -> None:
    """Let vLLM, in this process, decode the forms of images whose sizes are read before, and no other ones.

    vLLM opens about 35 forms, some by a few bytes in the middle: a file that begins as a JPEG can be a FLI to it, of
    another size. Images from ``allowed_media_domains`` have these forms, too.

    Raises `LoadError` if vLLM decodes another form all the same: its module has changed.
    """
    import_module("vllm.multimodal.image").ALLOWED_IMAGE_FORMATS = IMAGE_FORMS  # type: ignore[attr-defined]
    try:
        import_module("vllm.multimodal.media").ImageMediaIO().load_bytes(_UNBOUNDED_IMAGE)
    except ValueError:
        return
    raise LoadError(
        f"this vLLM decodes images of other forms than {', '.join(IMAGE_FORMS)}, whose sizes are not bounded: "
        "vllm.multimodal.image does not read ALLOWED_IMAGE_FORMATS"
    )


def _is_image(text: str) -> bool:
    try:
        return 0 not in image_size(base64.b64decode(text, validate=True))
    except ValueError:  # vLLM words this error
        return False


def _first_problem(error: ValueError) -> str:
    """Return the first problem of a ``ValidationError`` of pydantic, with the path of the member, in one line."""
    problems: Any = getattr(error, "errors", list)()
    if not problems:
        return one_line(str(error))[:500]
    path = ".".join(str(each) for each in problems[0]["loc"] if not str(each)[:1].isupper())  # without classes
    return one_line(f"{path}: {problems[0]['msg']}")[:500]


def _image(text: bytes) -> Any:
    """Return the image in ``text``, a file as base64, as vLLM's own server reads it. Raises `InvalidArgument`."""
    from vllm.multimodal.media import ImageMediaIO

    try:
        return ImageMediaIO().load_base64("image", text.decode())
    except ValueError as error:  # also what is no base64
        raise InvalidArgument(f"an image is not a file as base64: {one_line(str(error))[:200]}") from None


def template_text(model: Model) -> str | None:
    """Return the text of the template that the parameter names; None for the model's own."""
    name = model.parameters.chat_template
    return model.resource_or_above(name).read_text(encoding="utf-8") if name else None
