"""Embeddings and scores of one ``AsyncLLM``, made as vLLM's own server makes them.

vLLM's processors of inputs and outputs do the work that depends on the model: templates, pairs of texts in one prompt
or in two, the similarity of two vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from headrace import BackendError, LoadError, Model, ResourceExhausted, one_line
from headrace_llm import Task
from headrace_vllm.prompts import template_text


@dataclass(frozen=True, slots=True)
class Pooled:
    """The numbers for one row of a request, f32[width] for a text, one for a pair, and the tokens that were read."""

    numbers: Sequence[float]
    num_tokens: int


class TextPooler:
    """Makes the vectors or the scores of one ``AsyncLLM``. On its loop.

    Raises `LoadError` if the model is not for ``task``.
    """

    def __init__(self, client: Any, supported: Sequence[str], model: Model, task: Task) -> None:
        from vllm.entrypoints.pooling.factories import init_pooling_io_processors
        from vllm.renderers.chat_utils import ChatTemplateConfig
        from vllm.tasks import SCORE_TYPE_MAP

        self._client, self._name, self._numbers = client, model.name, count(1)
        self._has_priorities = client.vllm_config.scheduler_config.policy == "priority"
        try:
            template = ChatTemplateConfig(chat_template=template_text(model))
            processors = init_pooling_io_processors(supported, client.vllm_config, client.renderer, template)
        except (TypeError, KeyError, ValueError, RuntimeError) as error:
            raise LoadError(f"model '{model.name}': {one_line(str(error))}") from error
        names = ["embed"] if task is Task.EMBEDDING else list(SCORE_TYPE_MAP.values())
        found = [processors[name] for name in names if name in processors]
        if not found:
            hint = ". A model that ranks documents has one label" if "classify" in supported else ""
            raise LoadError(
                f"model '{model.name}' is not for {task.value}; vLLM has it for {', '.join(supported)}{hint}"
            )
        self._processor: Any = found[0]

    async def embed(self, text: str | Sequence[int], priority: int) -> Pooled:
        """Return the vector of ``text``, a string or tokens. Raises vLLM's errors."""
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest

        given = text if isinstance(text, str) else list(text)
        output = await self._pool(EmbeddingCompletionRequest(model=self._name, input=given), priority)
        return Pooled(output.outputs.data.float().tolist(), len(output.prompt_token_ids))

    async def score(self, query: str, document: str, priority: int) -> Pooled:
        """Return the relevance of ``document`` to ``query``. Raises vLLM's errors."""
        from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
        from vllm.outputs import ScoringRequestOutput

        output = await self._pool(RerankRequest(model=self._name, query=query, documents=[document]), priority)
        return Pooled([ScoringRequestOutput.from_base(output).outputs.score], len(output.prompt_token_ids))

    async def _pool(self, request: Any, priority: int) -> Any:
        """Return the one ``PoolingRequestOutput`` for ``request``, one of vLLM's own server."""
        from vllm.entrypoints.pooling.typing import PoolingServeContext

        processor = self._processor
        params = processor.create_pooling_params(request)
        params.verify(self._client.model_config)
        context = PoolingServeContext(
            request=request,
            model_name=self._name,
            request_id=f"{self._name}-{next(self._numbers)}",
            pooling_params=params,
            lora_request=None,
            priorities=priority if self._has_priorities else 0,
            prompt_extras=None,
        )
        rendered = [await processor.render_async(each) for each in processor.get_request_factory_online(context)]
        work = [
            asyncio.ensure_future(self._encode(prompt, f"{context.request_id}-{number}"))
            for number, prompt in enumerate(rendered)
        ]
        try:
            context.final_res_batch = list(await asyncio.gather(*work))
        finally:
            for each in work:
                each.cancel()
        processor.post_process_online(context)
        return context.final_res_batch[0]

    async def _encode(self, prompt: Any, request_id: str) -> Any:
        outputs = self._client.encode(
            prompt["prompts"], prompt["params"], request_id, prompt["lora_requests"], priority=prompt["priorities"]
        )
        (output,) = [each async for each in outputs]
        if output.error is not None:
            kind = ResourceExhausted if output.error.retryable else BackendError
            raise kind(f"model '{self._name}': {one_line(output.error.message)[:500]}")
        return output
