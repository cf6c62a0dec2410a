"""The instance of a model that generates text: checks requests, makes their prompts, and gives them to an engine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from headrace import BackendError, HeadraceError, InvalidArgument, LoadError, Model, Unavailable, Unsupported, one_line
from headrace_llm import GenerationInstance, GenerationRequest, HermesParser, TokenStream, images_in, shown
from headrace_transformers.chat import ChatPrompts
from headrace_transformers.continuous import ContinuousEngine
from headrace_transformers.generation_job import GenerationJob
from headrace_transformers.image_prompts import ImagePrompts
from headrace_transformers.one_by_one import OneByOneEngine
from headrace_transformers.structured_texts import StructuredTexts
from headrace_transformers.text_stream import TextStream, decoder_of, text_of
from headrace_transformers.token_choice import TokenChooser, config_of
from headrace_transformers.transformers_engine import OpenedTransformer, release_memory, threads_of

log = logging.getLogger("headrace.transformers")

Engine: TypeAlias = "ContinuousEngine | OneByOneEngine"


class TransformersGenerator(GenerationInstance):
    """Generates by `ContinuousEngine`, or by `OneByOneEngine` where that does not work."""

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        self._opened, self._tokenizer = opened, opened.tokenizer
        self._torch = opened.torch
        self._base = opened.model.generation_config
        head = opened.model.get_output_embeddings()
        self._vocabulary = opened.config.get_text_config().vocab_size if head is None else head.weight.shape[0]
        self._eos = _eos_of(opened)
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self._constraints = StructuredTexts(self._tokenizer, self._vocabulary, self._torch)
        self._images = ImagePrompts(opened.processor) if opened.processor is not None else None
        template = self._images.template if self._images is not None else self._tokenizer.chat_template
        self._prompts = ChatPrompts(self._tokenizer, template, self._images is not None)
        self._has_tool_calls = HermesParser.BEGIN in str(template)
        #: For templates and long prompts, which would block the thread of the instance.
        self._preparing = ThreadPoolExecutor(2, f"{model.name} prompts")
        self._names: dict[TokenStream, tuple[Engine, str]] = {}
        self._engine = _engine_of(model, opened)  # behind all that may fail: it has threads
        #: For requests with an adapter: a batch has one model.
        self._adapter_engine = _one_by_one(model, opened) if opened.adapters else None
        context = 0 if opened.is_encoder_decoder else opened.context()
        limits = [limit for limit in (context, self._engine.most_tokens) if limit]
        self._limit = min(limits, default=0)
        super().__init__(model, model.parameters.max_streams)

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        _refuse(request, self._opened.adapters)
        if request.images and self._images is None:
            raise Unsupported("this model reads no images")
        self._preparing.submit(self._submit, request, stream)

    def cancel(self, stream: TokenStream) -> None:
        if stream in self._names:
            engine, name = self._names[stream]
            engine.cancel(name)

    def forget(self, stream: TokenStream) -> None:
        super().forget(stream)
        if (found := self._names.pop(stream, None)) is not None:
            engine, name = found
            engine.cancel(name)

    def _forget_if_ended(self, stream: TokenStream) -> None:
        """Forget ``stream`` if it ended before the engine accepted it."""
        if stream.is_cancelled:
            self.forget(stream)

    def close(self) -> None:
        self.fail_all(Unavailable(f"model '{self._name}' is being unloaded"))
        self._preparing.shutdown(wait=True, cancel_futures=True)
        self._engine.close()
        if self._adapter_engine is not None:
            self._adapter_engine.close()
        self._prompts.close()
        super().close()
        del self._engine, self._adapter_engine, self._opened, self._base
        release_memory()

    def _submit(self, request: GenerationRequest, stream: TokenStream) -> None:
        try:
            if not stream.is_cancelled:
                engine = self._engine_for(request)
                if self._images is not None and isinstance(engine, OneByOneEngine):
                    make = partial(self._job, request, stream, engine)
                    self._names[stream] = (engine, engine.submit_prompt(stream, make))
                else:
                    self._names[stream] = (engine, engine.submit(self._job(request, stream, engine)))
                self._forget_if_ended(stream)
        except HeadraceError as error:
            stream.fail(error)
        except Exception as error:
            log.exception("preparing a request failed")
            stream.fail(BackendError(f"preparing a request failed: {type(error).__name__}: {one_line(str(error))}"))

    def _engine_for(self, request: GenerationRequest) -> Engine:
        if not request.sampling.lora_name or self._adapter_engine is None:
            return self._engine
        return self._adapter_engine

    def _job(self, request: GenerationRequest, stream: TokenStream, engine: Engine) -> GenerationJob:
        prompt, tensors = self._prompt(request)
        most = self._limit - len(prompt) if self._limit else 1 << 20
        if most < 1:
            raise InvalidArgument(f"the prompt has {len(prompt)} tokens, the limit of this model is {self._limit - 1}")
        eos = () if request.sampling.ignore_eos else self._eos
        config = config_of(self._base, request, eos)
        text = TextStream(decoder_of(self._tokenizer), request.sampling.stop)
        reads_calls = bool(request.tools) and request.tool_choice != "none" and self._has_tool_calls
        return GenerationJob(
            stream,
            prompt,
            min(request.max_tokens or most, most),
            frozenset(eos),
            self._chooser(request, prompt, config, eos, engine),
            text,
            HermesParser() if reads_calls else None,
            config,
            self._opened.adapters.get(request.sampling.lora_name, self._opened.model),
            tensors,
        )

    def _prompt(self, request: GenerationRequest) -> tuple[Sequence[int], dict[str, Any]]:
        """Return the tokens of the prompt, and the tensors beside them."""
        if request.input_ids is not None:
            if (largest := max(request.input_ids)) >= self._vocabulary:
                raise InvalidArgument(
                    f"input 'input_ids' has the token {largest}, the vocabulary of this model ends at "
                    f"{self._vocabulary - 1}"
                )
            return request.input_ids, {}
        text = request.text if request.text is not None else self._prompts.render(request)
        if self._limit and len(text) > self._limit * self._longest_token:
            raise InvalidArgument(
                f"the prompt has {len(text)} characters: more than {self._limit} tokens, the limit of this model"
            )
        if self._images is not None:
            images = self._images.decode(images_in(request))
            with self._opened.tokenizing:
                return self._images.read(text, images)
        with self._opened.tokenizing:
            ids: Sequence[int] = self._tokenizer(text, add_special_tokens=request.text is not None).input_ids
        if not ids:
            raise InvalidArgument("the prompt has no tokens")
        return ids, {}

    def _chooser(
        self, request: GenerationRequest, prompt: Sequence[int], config: Any, eos: Sequence[int], engine: Engine
    ) -> TokenChooser | None:
        sampling = request.sampling
        for token in sampling.logit_bias:
            if token >= self._vocabulary:
                raise InvalidArgument(
                    f"logit_bias has the token {token}, the vocabulary of this model ends at {self._vocabulary - 1}"
                )
        samples = bool(self._base.do_sample) if sampling.temperature is None else sampling.temperature > 0
        processors = self._processors(config, len(prompt), eos, engine)
        wants = request.wants_logprobs or request.wants_cumulative_logprob or sampling.logprobs is not None
        adjusts = sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias or sampling.min_tokens
        if not (samples or processors or wants or adjusts or sampling.structured):
            return None
        return TokenChooser(
            self._torch,
            request,
            prompt,
            eos=eos,
            samples=samples,
            processors=processors,
            warpers=self._warpers(request) if samples else (),
            constraint=self._constraints.make(sampling.structured) if sampling.structured else None,
            text_of=partial(text_of, self._tokenizer),
            device=self._opened.device,
        )

    def _processors(self, config: Any, prompt_tokens: int, eos: Sequence[int], engine: Engine) -> Sequence[Any]:
        """Return transformers' processors of ``config``; ``generate`` adds them itself."""
        if isinstance(engine, OneByOneEngine):
            return ()
        config._eos_token_tensor = self._torch.tensor(eos or [-1], device=self._opened.device)
        made: Sequence[Any] = self._opened.model._get_logits_processor(
            config, input_ids_seq_length=prompt_tokens, device=self._opened.device
        )
        return made

    def _warpers(self, request: GenerationRequest) -> Sequence[Any]:
        """Return transformers' warpers in the order of its ``generate``."""
        import transformers

        sampling, base = request.sampling, self._base

        def value(name: str, none: float) -> Any:
            asked = getattr(sampling, name)
            given = asked if asked is not None else getattr(base, name, None)
            return None if given is None or given == none else given

        made: list[Any] = []
        if temperature := value("temperature", 1.0):
            made.append(transformers.TemperatureLogitsWarper(float(temperature)))
        if (top_k := value("top_k", 0)) and top_k > 0:
            made.append(transformers.TopKLogitsWarper(int(top_k)))
        if (top_p := value("top_p", 1.0)) is not None:
            made.append(transformers.TopPLogitsWarper(float(top_p)))
        if (min_p := value("min_p", 0.0)) is not None:
            made.append(transformers.MinPLogitsWarper(float(min_p)))
        return made


def _engine_of(model: Model, opened: OpenedTransformer) -> Engine:
    parameters, threads = model.parameters, threads_of(model)
    if parameters.continuous_batching and not (opened.is_encoder_decoder or opened.files.has_vision):
        attention = opened.config._attn_implementation
        try:
            return ContinuousEngine(opened, parameters.max_running, parameters.cache_tokens, threads)
        except Exception as error:  # it depends on the model, and on the version of transformers
            if opened.config._attn_implementation != attention:
                opened.model.set_attn_implementation(attention)
            reason = one_line(f"{type(error).__name__}: {error}")[:300]
            log.warning("model '%s' runs its requests one by one: no continuous batching: %s", model.name, reason)
    return _one_by_one(model, opened)


def _one_by_one(model: Model, opened: OpenedTransformer) -> OneByOneEngine:
    return OneByOneEngine(opened, min(model.parameters.max_running, 4), threads_of(model))


def _eos_of(opened: OpenedTransformer) -> Sequence[int]:
    given = opened.model.generation_config.eos_token_id
    if given is None:
        given = opened.tokenizer.eos_token_id
    tokens = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(token) is int for token in tokens):
        raise LoadError(
            f"{opened.files.folder}: eos_token_id is {shown(given)}, expected a token, or an array of tokens"
        )
    return tokens


def _refuse(request: GenerationRequest, adapters: Collection[str]) -> None:
    """Raise an error with the name of the feature if ``request`` has one that this engine lacks."""
    sampling = request.sampling
    if sampling.more:
        name = one_line(next(iter(sampling.more)))[:100]
        raise InvalidArgument(f"sampling_parameters has the member '{name}', which this engine does not have")
    if sampling.lora_name and sampling.lora_name not in adapters:
        has = f"expected one of {', '.join(adapters)}" if adapters else "but this model has no adapters"
        raise InvalidArgument(f"lora_name is '{one_line(sampling.lora_name)[:200]}', {has}")
    if request.tools and request.tool_choice not in (None, "auto", "none"):
        raise Unsupported("tool_choice must be auto or none: this backend cannot force a call")
