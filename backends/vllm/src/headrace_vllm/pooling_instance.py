"""The instance of a model that makes embeddings or ranks documents: gives the rows of requests to vLLM's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from headrace import (
    BytesTensor,
    Call,
    Cancelled,
    DeferredInstance,
    HeadraceError,
    InferRequest,
    InferResponse,
    InvalidArgument,
    Model,
    ResourceExhausted,
    Unavailable,
)
from headrace_llm import Task
from headrace_vllm.engine_arguments import EngineArguments
from headrace_vllm.engine_errors import error_of
from headrace_vllm.engine_start import LAST, EngineStart
from headrace_vllm.engine_thread import EngineThread
from headrace_vllm.text_pooler import Pooled, TextPooler

#: The interval, in seconds, of the checks for disconnected callers and passed deadlines.
_CHECK_S: Final = 0.05


class PoolingInstance(DeferredInstance):
    """One engine of vLLM. If the engine dies, its requests end with an error and it is started again.

    - embedding: ``text`` BYTES[1] or ``input_ids`` INT32[n] to ``embedding`` f32[width]
    - reranking: ``query`` and ``document`` BYTES[1] to ``score`` f32[1]

    Both have ``num_input_tokens`` u32[1]. With a ``max_batch_size``, all have a first axis: the rows of a request.
    """

    def __init__(self, model: Model, arguments: EngineArguments, task: Task) -> None:
        self._model, self._task, self._most = model, task, model.parameters.max_streams
        self._is_batched = model.config.max_batch_size > 0
        #: The calls without an answer. The code that removes one answers it.
        self._calls: dict[Call, None] = {}
        self._pooler: TextPooler
        self._start = EngineStart(model, arguments)
        self._engine = EngineThread(model.name, self._start_engine, self._fail_all)

    def accept(self, calls: Sequence[Call]) -> Sequence[InferResponse | HeadraceError | None]:
        return [self._accept(call) for call in calls]

    def _accept(self, call: Call) -> HeadraceError | None:
        if len(self._calls) >= self._most:
            return ResourceExhausted(
                f"model '{self._model.name}' has {len(self._calls)} requests, its limit (max_streams) is {self._most}"
            )
        try:
            rows = self._rows(call.request)
            _ = self._engine.client
        except HeadraceError as error:
            return error
        self._calls[call] = None
        self._engine.submit(call, self._serve(call, rows))
        return None

    def is_ready(self) -> bool:
        """True if the engine lives. Raises `Unavailable` with the reason if it is being started again."""
        return not self._engine.client.errored

    def close(self) -> None:
        self._fail_all(Unavailable(f"model '{self._model.name}' is being unloaded"))
        self._engine.close()
        self._start.close()

    async def _start_engine(self) -> Any:
        client = self._start.start()
        try:
            self._pooler = TextPooler(client, await client.get_supported_tasks(), self._model, self._task)
        except BaseException:
            client.shutdown()
            raise
        return client

    def _fail_all(self, error: Unavailable) -> None:
        for call in tuple(self._calls):
            self._answer(call, error)

    def _answer(self, call: Call, answer: InferResponse | HeadraceError) -> None:
        if self._calls.pop(call, call) is None:
            call.send(answer)

    async def _serve(self, call: Call, rows: Sequence[Any]) -> None:
        """Answer ``call``. Stop if its caller disconnects, or its deadline passes."""
        request = call.request
        work = [asyncio.ensure_future(self._pool(row, request.priority or LAST)) for row in rows]
        pooled = asyncio.gather(*work)
        end_ns = request.deadline_ns
        try:
            while not (await asyncio.wait((pooled,), timeout=_CHECK_S))[0]:
                if request.cancelled:
                    raise Cancelled("the caller has disconnected")
                if end_ns and monotonic_ns() >= end_ns:
                    raise Unavailable("Request timeout expired")  # Triton's text for a queue
            self._answer(call, self._response(pooled.result()))
        except asyncio.CancelledError:
            self._answer(call, Unavailable(f"the vLLM engine of model '{self._model.name}' has ended"))
        except Exception as error:
            self._answer(call, error_of(error, self._model.name, self._engine.check))
        finally:
            for each in work:
                each.cancel()

    def _pool(self, row: Any, priority: int) -> Awaitable[Pooled]:
        if self._task is Task.RERANKING:
            query, document = row
            return self._pooler.score(query, document, priority)
        return self._pooler.embed(row, priority)

    def _response(self, pooled: Sequence[Pooled]) -> InferResponse:
        numbers = np.array([each.numbers for each in pooled], np.float32)
        counts = np.array([[each.num_tokens] for each in pooled], np.uint32)
        if not self._is_batched:
            [numbers], [counts] = numbers, counts
        return InferResponse({self._output: numbers, "num_input_tokens": counts})

    @property
    def _output(self) -> str:
        return "score" if self._task is Task.RERANKING else "embedding"

    def _rows(self, request: InferRequest) -> Sequence[Any]:
        """Return a text, tokens, or a pair of texts for each row of ``request``. Raises `InvalidArgument`."""
        if self._task is Task.RERANKING:
            return list(zip(_texts(request, "query"), _texts(request, "document"), strict=True))
        if ("text" in request.inputs) == ("input_ids" in request.inputs):
            raise InvalidArgument("a request has either text or input_ids")
        if "text" in request.inputs:
            return _texts(request, "text")
        ids = np.asarray(request.inputs["input_ids"])
        rows = ids.tolist() if self._is_batched else [ids.ravel().tolist()]
        if not all(rows):
            raise InvalidArgument("input 'input_ids' is empty")
        if ids.size and ids.min() < 0:
            raise InvalidArgument(f"input 'input_ids' has the token {ids.min()}, the least is 0")
        return rows


def _texts(request: InferRequest, name: str) -> list[str]:
    tensor = request.inputs[name]
    items = tensor.items() if isinstance(tensor, BytesTensor) else []
    try:
        texts = [bytes(item).decode() for item in items]
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise InvalidArgument(f"input '{name}' is not UTF-8: {byte}") from None
    if not all(texts):
        raise InvalidArgument(f"input '{name}' is empty")
    return texts
