"""The instance: gives requests to vLLM's engine, and its outputs to their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any

from headrace import Cancelled, InvalidArgument, Model, NotFound, Unavailable, one_line
from headrace_llm import GenerationInstance, GenerationRequest, TokenStream
from headrace_vllm.engine_arguments import EngineArguments
from headrace_vllm.engine_errors import error_of
from headrace_vllm.engine_start import LAST, EngineStart
from headrace_vllm.engine_thread import EngineThread
from headrace_vllm.output_reader import DeltaReader, start_ns
from headrace_vllm.prompts import PromptRenderer
from headrace_vllm.sampling_parameters import sampling_arguments, template_arguments


class VLLMInstance(GenerationInstance):
    """One engine of vLLM. If the engine dies, its requests end with an error and it is started again."""

    def __init__(self, model: Model, arguments: EngineArguments) -> None:
        super().__init__(model, model.parameters.max_streams)
        self._model, self._numbers = model, count(1)
        self._adapters = {name: (number, path) for number, (name, path) in enumerate(arguments.adapters.items(), 1)}
        self._renderer: PromptRenderer
        self._start = EngineStart(model, arguments, self.metrics.note_cache_usage)
        try:
            self._engine = EngineThread(model.name, self._start_engine, self._engine_died)
        except BaseException:
            super().close()
            raise

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        client = self._engine.client
        sampling = self._sampling(request, client)
        adapter = self._adapter(request.sampling.lora_name)
        template_arguments(request)
        self._engine.submit(stream, self._generate(client, request, stream, sampling, adapter))

    def cancel(self, stream: TokenStream) -> None:
        self._engine.cancel(stream)

    def is_ready(self) -> bool:
        """True if the engine lives. Raises `Unavailable` with the reason if it is being started again."""
        return not self._engine.client.errored

    def close(self) -> None:
        self.fail_all(Unavailable(f"model '{self._model.name}' is being unloaded"))
        self._engine.close()
        self._start.close()
        super().close()

    async def _start_engine(self) -> Any:
        client = self._start.start()
        try:
            self._renderer = PromptRenderer(client, self._model)
            self._defaults: Mapping[str, Any] = client.model_config.get_diff_sampling_param()
            policy = client.vllm_config.scheduler_config.policy
            self._has_priorities = policy == "priority"
        except BaseException:
            client.shutdown()
            raise
        return client

    def _engine_died(self, error: Unavailable) -> None:
        self.fail_all(error)

    def _sampling(self, request: GenerationRequest, client: Any) -> Any:
        """Return the ``SamplingParams`` of ``request``. Raises `InvalidArgument`."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        arguments = sampling_arguments(request, self._defaults)
        structured = request.sampling.structured
        try:
            if structured:
                arguments["structured_outputs"] = StructuredOutputsParams(**structured)
            return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidArgument(f"sampling_parameters: {one_line(str(error))[:500]}") from error

    def _adapter(self, name: str) -> Any:
        """Return the ``LoRARequest`` of the adapter ``name``; None for none."""
        if not name:
            return None
        if not self._adapters:
            raise InvalidArgument("LoRA feature is not enabled.")  # Triton's text
        if name not in self._adapters:
            raise NotFound(f"LoRA {one_line(name)} is not supported, we currently support {list(self._adapters)}")
        from vllm.lora.request import LoRARequest

        number, path = self._adapters[name]
        return LoRARequest(name, number, path)

    async def _generate(
        self, client: Any, request: GenerationRequest, stream: TokenStream, sampling: Any, adapter: Any
    ) -> None:
        try:
            prompt = await self._renderer.render(request, sampling)
            outputs = await client.add_request(
                f"{self._model.name}-{next(self._numbers)}",
                prompt.rendered,
                sampling,
                lora_request=adapter,
                priority=(request.priority or LAST) if self._has_priorities else 0,
                **prompt.more,
            )
            stream.note_prompt(len(prompt.rendered.get("prompt_token_ids") or ()))
            await _send(client, outputs, prompt.reader, stream)
        except asyncio.CancelledError:
            stream.fail(Cancelled("the caller has disconnected"))
        except Exception as error:
            stream.fail(error_of(error, self._model.name, self._engine.check))


async def _send(client: Any, outputs: Any, reader: DeltaReader, stream: TokenStream) -> None:
    """Send ``outputs``, the ``RequestOutputCollector`` of a request, to ``stream``. Abort the request if that stops.

    ``AsyncLLM.generate`` does the same, but does not say when the engine has accepted the prompt.
    """
    is_finished = False
    try:
        output = await outputs.get()
        if started_ns := start_ns(output):
            stream.note_start(started_ns)
        while True:
            is_finished = output.finished
            if not stream.write(reader.read(output)) or is_finished:
                return
            output = outputs.get_nowait() or await outputs.get()
    finally:
        if not is_finished:
            await client.abort(outputs.request_id, internal=True)
        outputs.close()
