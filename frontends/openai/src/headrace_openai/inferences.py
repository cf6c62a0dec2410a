"""Several inferences of one request to ``/v1``: a text or a document per row, in batches if the model takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from headrace import (
    BackendError,
    BytesTensor,
    Caller,
    Cancelled,
    Engine,
    HeadraceError,
    InferRequest,
    InferResponse,
    InvalidArgument,
    ModelView,
    Spec,
)

#: The most rows of one request to ``/v1``; OpenAI's own limit for embeddings.
MAX_ROWS = 2048
#: The most inferences of one request that are on their way at once.
_AT_ONCE = 32


def encode_text(text: str, name: str) -> bytes:
    """Return ``text``, the member ``name`` of a body, as UTF-8. Raises `InvalidArgument` for half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise InvalidArgument(f"{name}: {half!r} is half a surrogate pair, which UTF-8 can not encode") from None


def string_rows(spec: Spec, rows: Sequence[bytes], is_batched: bool) -> BytesTensor:
    """Return ``rows`` as the input ``spec``: a string each. Without a batch axis it is one row."""
    shape = tuple(1 for _ in spec.dims)
    return BytesTensor.from_items(rows, (len(rows), *shape) if is_batched else shape)


def row_requests(
    model: ModelView, columns: Sequence[tuple[Spec, Sequence[bytes]]], outputs: Sequence[str], request_id: str
) -> list[InferRequest]:
    """Return the requests to ``model`` for the rows of ``columns``, in order: as few as its ``max_batch_size`` allows.

    A column is an input of strings and its value in each row.
    """
    most, count = model.max_batch_size, len(columns[0][1])
    return [
        InferRequest(
            model.name,
            {spec.name: string_rows(spec, rows[at : at + (most or 1)], most > 0) for spec, rows in columns},
            outputs,
            request_id,
        )
        for at in range(0, count, most or 1)
    ]


@contextmanager
def ending(caller: Caller | None, only_errors: bool = False) -> Iterator[None]:
    """End the operation of ``caller``, which was admitted, with the block or its error. Or with ``only_errors``."""
    try:
        yield
    except HeadraceError as error:
        if caller is not None:
            caller.end(error)
        raise
    except BaseException:
        if caller is not None:
            caller.end(Cancelled("the caller has disconnected"))
        raise
    if caller is not None and not only_errors:
        caller.end()


async def responses_to(
    engine: Engine, requests: Sequence[InferRequest], caller: Caller | None, deadline_ns: int
) -> Sequence[InferResponse]:
    """Return the one response to each of ``requests``, in their order. At most `_AT_ONCE` run at once.

    For interceptors, all are one inference, of ``caller``. ``deadline_ns`` is that of all, 0 for none.
    Raises the first `HeadraceError`, and cancels the others.
    """
    if deadline_ns:
        for request in requests:
            request.expire_at(deadline_ns)
    if len(requests) == 1:
        return [await _response_to(engine, requests[0], caller)]
    free = asyncio.Semaphore(_AT_ONCE)

    async def answer(request: InferRequest) -> InferResponse:
        async with free:
            part = None if caller is None else Caller("model", parent=caller)
            return await _response_to(engine, request, part)

    tasks = [asyncio.ensure_future(answer(each)) for each in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _response_to(engine: Engine, request: InferRequest, caller: Caller | None) -> InferResponse:
    responses: AsyncIterator[InferResponse] = engine.responses(request, caller)
    found = [response async for response in responses]
    if len(found) != 1:
        raise BackendError(f"model '{request.model_name}' gave {len(found)} responses, expected one")
    return found[0]
