"""From requests to vLLM's prompts: text, tokens, images, and chats by the model's template and parsers."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import urlsplit

from headrace import InvalidArgument, LoadError, Model, Unsupported, one_line
from headrace_llm import GenerationRequest
from headrace_vllm.output_reader import DeltaReader, partial_text
from headrace_vllm.sampling_parameters import template_arguments

log = logging.getLogger("headrace.vllm")

#: The most pixels of all images of a request: about 200 MB of RGB.
MAX_PIXELS: Final = 1 << 26
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
            check_pixels(request.images)
            prompt["multi_modal_data"] = {"image": [_image(each) for each in request.images]}
        (rendered,) = await self._renderer.render_cmpl_async([parse_model_prompt(self._config, prompt)])
        return RenderedPrompt(rendered, DeltaReader(sampling.logprobs, self._partial_text))

    async def _chat(self, request: GenerationRequest, sampling: Any) -> RenderedPrompt:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._check_addresses(request)
        check_pixels(data_in(request.messages or ()))
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
            for address in addresses_in(request.messages or ()):
                if urlsplit(address).scheme != "data":
                    raise InvalidArgument(
                        f"a message has the address '{one_line(address)[:100]}': only data: is allowed. To fetch from "
                        "other hosts, name them in allowed_media_domains of model.json"
                    )


def addresses_in(messages: Any) -> Iterator[str]:
    """Yield the addresses in ``messages``: strings beside the member names that hold them, at any depth."""
    waiting = list(messages)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if (name in _ADDRESSES or name == "url") and isinstance(inner, str):
                    yield inner
                else:
                    waiting.append(inner)
        elif isinstance(value, list):
            waiting += value


def data_in(messages: Any) -> Iterator[bytes]:
    """Yield the files in the data URLs of ``messages``, as base64."""
    for address in addresses_in(messages):
        if address[:5].lower() == "data:":
            yield address.partition(",")[2].encode("ascii", "replace")


def check_pixels(files: Iterable[bytes]) -> None:
    """Raise `InvalidArgument` if the images among ``files``, which are base64, have more than `MAX_PIXELS` together.

    A PNG of 100 KB may have 10,000 x 10,000 pixels, which vLLM would decode. What is no image is left to vLLM.
    """
    from PIL import Image

    pixels = 0
    for number, text in enumerate(files, 1):
        try:
            with Image.open(io.BytesIO(base64.b64decode(text))) as image:  # reads its first bytes
                width, height = image.size
        except Image.DecompressionBombError as error:
            raise InvalidArgument(f"image {number}: {one_line(str(error))[:200]}") from None
        except Exception as error:  # a damaged file raises what its decoder stumbles over
            log.debug("image %d cannot be opened: %s", number, error)
            continue
        pixels += width * height
        if pixels > MAX_PIXELS:
            raise InvalidArgument(
                f"image {number} has {width} x {height} pixels: the images of a request may have {MAX_PIXELS} together"
            )


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
