"""The table of all RPCs of the server, from the methods of extensions, for any transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import HeadraceError
from headrace.frontends.failures import Failure, is_verbose, log, log_failure
from headrace_grpc.absent_methods import ABSENT
from headrace_grpc.admitted_calls import admitted
from headrace_grpc.infer import Inference
from headrace_grpc.plugin_methods import GrpcMethod, MethodServices, RpcWrapper, read_name
from headrace_grpc.rpc import (
    Answer,
    Cancel,
    Context,
    Direct,
    Reply,
    Rpc,
    Send,
    Stream,
    Unary,
)

if TYPE_CHECKING:
    from headrace.engine import Engine


def rpcs(engine: Engine) -> list[Rpc]:
    """Return the RPCs of ``engine``. With interceptors, each call is admitted first."""
    methods: list[GrpcMethod] = engine.additions(GrpcMethod)
    names = {method.name for method in methods}
    methods += [part(AbsentOwner(engine)) for part in ABSENT if part.name not in names]
    services = sorted({read_name(type(method))[0] for method in methods})
    shared = MethodServices(Inference(engine), services)
    offered = [method.rpc(shared) for method in methods]
    for wrapper in engine.additions(RpcWrapper):
        offered = [_changed(rpc, wrapper.wrap(rpc)) for rpc in offered]
    table = [_complete(rpc, engine) for rpc in offered]
    if engine.log is not None:
        engine.log.on_change.append(partial(_complete_again, table, offered, engine))
    return table


def _complete(rpc: Rpc, engine: Engine) -> Rpc:
    """Return ``rpc`` with logging if the log is verbose, and with admission if there are interceptors."""
    watched = _changed(rpc, _watched(rpc)) if is_verbose() else rpc
    return watched if engine.admission is None else admitted(watched, engine.admission, engine.off_loop_work)


def _changed(rpc: Rpc, changed: Rpc) -> Rpc:
    """Return ``changed``, which is made from ``rpc``, without the handlers that pass by another ``direct``."""
    return changed if changed.direct is rpc.direct else replace(changed, unadmitted=None, recorded=None, permitted=None)


def _complete_again(table: list[Rpc], offered: list[Rpc], engine: Engine) -> None:
    """Give each RPC of ``table`` the handlers that the present settings of the log ask for. Calls in flight keep
    theirs."""
    for rpc, plain in zip(table, offered, strict=True):
        rpc.use_handlers(_complete(plain, engine))


class AbsentOwner(NamedTuple):
    """Replaces the extension of a method that is not installed."""

    engine: Engine


# ---------------------------------------------------------------------- what a verbose log says, in Triton's words

_Step = Callable[[int, str], None]


def _watched(rpc: Rpc) -> Rpc:
    """Return ``rpc`` with logging of every call. Errors on a stream are logged where they are answered."""
    log.debug("Ready for RPC '%s', 0", rpc.name)
    if rpc.unary is not None:
        return replace(rpc, unary=_watch_unary(rpc.name, rpc.unary))
    if rpc.direct is not None:
        return replace(rpc, direct=_watch_direct(f"{rpc.name}Handler", rpc.direct))
    assert rpc.stream is not None
    return replace(rpc, stream=_watch_stream(f"{rpc.name}Handler", rpc.stream))


def _steps(name: str) -> _Step:
    def step(number: int, what: str) -> None:
        log.debug("Process for %s, rpc_ok=1, %d step %s", name, number, what)

    return step


def _watch_unary(name: str, handler: Unary) -> Unary:
    numbers, step = count(), _steps(name)

    async def watch(request: Any, context: Context) -> Answer:
        number = next(numbers)
        step(number, "START")
        try:
            return await handler(request, context)
        except HeadraceError as error:
            model = getattr(request, "model_name", "") or getattr(request, "name", "")
            log_failure(Failure.of(error), name, model, getattr(request, "version", ""))
            raise
        finally:
            step(number, "COMPLETE")
            log.debug("Done for %s, %d", name, number)

    return watch


def _watch_direct(name: str, handler: Direct) -> Direct:
    numbers, step = count(), _steps(name)

    def watch(request: Any, context: Context, reply: Reply) -> Cancel | None:
        number, message = next(numbers), request.message
        log.debug("New request handler for %s, %d", name, number)
        step(number, "START")

        def logged_reply(answer: bytes | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                log_failure(Failure.of(answer), "Infer", message.model_name, message.model_version, message.id)
            step(number, "COMPLETE")
            reply(answer)
            step(number, "FINISH")
            log.debug("Done for %s, %d", name, number)

        try:
            return handler(request, context, logged_reply)
        except HeadraceError as error:
            logged_reply(error)
            return None

    return watch


def _watch_stream(name: str, handler: Stream) -> Stream:
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
