"""What a verbose log says of each gRPC call, in Triton's words. Made only where it is verbose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.frontends.failures import Failure, log, tell
from headrace.frontends.grpc.context import Cancel, Context, Reply, Send

if TYPE_CHECKING:
    from headrace.frontends.grpc.rpcs import Answer, Direct, Rpc, Stream, Unary

Step = Callable[[int, str], None]


def watched(rpc: Rpc) -> Rpc:
    """``rpc``, with the log told of every call. Errors on a stream are told where they are answered."""
    log.debug("Ready for RPC '%s', 0", rpc.name)
    if rpc.unary is not None:
        return replace(rpc, unary=_unary(rpc.name, rpc.unary))
    if rpc.direct is not None:
        return replace(rpc, direct=_direct(f"{rpc.name}Handler", rpc.direct))
    assert rpc.stream is not None
    return replace(rpc, stream=_stream(f"{rpc.name}Handler", rpc.stream))


def _steps(name: str) -> Step:
    def step(number: int, what: str) -> None:
        log.debug("Process for %s, rpc_ok=1, %d step %s", name, number, what)

    return step


def _unary(name: str, handler: Unary) -> Unary:
    numbers, step = count(), _steps(name)

    async def watch(request: Any, context: Context) -> Answer:
        number = next(numbers)
        step(number, "START")
        try:
            return await handler(request, context)
        except HeadraceError as error:
            model = getattr(request, "model_name", "") or getattr(request, "name", "")
            tell(Failure.of(error), name, model, getattr(request, "version", ""))
            raise
        finally:
            step(number, "COMPLETE")
            log.debug("Done for %s, %d", name, number)

    return watch


def _direct(name: str, handler: Direct) -> Direct:
    numbers, step = count(), _steps(name)

    def watch(request: Any, context: Context, reply: Reply) -> Cancel | None:
        number, message = next(numbers), request.message
        log.debug("New request handler for %s, %d", name, number)
        step(number, "START")

        def told(answer: bytes | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                tell(Failure.of(answer), "Infer", message.model_name, message.model_version, message.id)
            step(number, "COMPLETE")
            reply(answer)
            step(number, "FINISH")
            log.debug("Done for %s, %d", name, number)

        try:
            return handler(request, context, told)
        except HeadraceError as error:
            told(error)
            return None

    return watch


def _stream(name: str, handler: Stream) -> Stream:
    numbers, step = count(), _steps(name)

    async def watch(requests: AsyncIterator[Any], send: Send, context: Context) -> None:
        number = next(numbers)
        log.debug("New request handler for %s, %d", name, number)
        step(number, "START")

        async def read() -> AsyncIterator[Any]:
            async for request in requests:
                step(number, "READ")
                yield request

        async def write(body: bytes) -> None:
            await send(body)
            step(number, "WRITTEN")

        try:
            await handler(read(), write, context)
        finally:
            step(number, "COMPLETE")
            log.debug("Done for %s, %d", name, number)

    return watch
