"""gRPC calls that are delayed: wraps the handlers of all RPCs when the server starts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from headrace import Addition, Engine, Extension, HeadraceError, Operation, Rpc, RpcWrapper
from headrace_test_switches.delays import Delays, variables_set

log = logging.getLogger(__name__)


class DelayedCalls(RpcWrapper):
    """Delays the calls of each RPC."""

    name = "delays"
    extension: TestSwitches

    def wrap(self, rpc: Rpc) -> Rpc:
        delays = self.extension.delays
        if rpc.operation is Operation.OPEN_STREAM:
            return replace(rpc, stream=_stream(rpc.stream, delays))
        if rpc.operation is Operation.INFER:
            return replace(rpc, direct=_inference(rpc.direct, delays)) if rpc.direct is not None else rpc
        if rpc.unary is not None and delays.other_response_s:
            return replace(rpc, unary=_other(rpc.unary, delays.other_response_s))
        return rpc


class TestSwitches(Extension):
    """Enabled if the environment sets a delay."""

    __test__ = False  # pytest would collect it as a test
    name: ClassVar[str] = "test-switches"
    adds: ClassVar[Sequence[type[Addition]]] = (DelayedCalls,)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.delays = Delays.from_environ(os.environ)
        for name, value in variables_set(os.environ).items():
            log.warning("%s=%s delays gRPC calls: this is for tests of clients", name, value)

    @property
    def enabled(self) -> bool:
        return self.delays != Delays()


def _other(handler: Any, delay_s: float) -> Any:
    async def call(request: Any, context: Any) -> Any:
        answer = await handler(request, context)
        await asyncio.sleep(delay_s)
        return answer

    return call


def _inference(handler: Any, delays: Delays) -> Any:
    """Return ``handler`` of ModelInfer, which answers by callback, with its delays."""

    def call(request: Any, context: Any, reply: Callable[[bytes | HeadraceError], None]) -> Callable[[], object]:
        running = DelayedInference(reply, delays)
        running.begin(lambda: handler(request, context, running.answer))
        return running.cancel_later

    return call


class DelayedInference:
    """One inference: waits, runs, waits, and is answered."""

    def __init__(self, reply: Callable[[bytes | HeadraceError], None], delays: Delays) -> None:
        self._reply, self._delays = reply, delays
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._cancel: Callable[[], object] | None = None
        self._is_cancelled = False

    def begin(self, handle: Callable[[], Callable[[], object] | None]) -> None:
        def run() -> None:
            try:
                self._cancel = handle()
            except HeadraceError as error:
                self.answer(error.with_traceback(None))

        if self._delays.request_s:
            self._timer = self._loop.call_later(self._delays.request_s, run)
        else:
            run()

    def answer(self, answer: bytes | HeadraceError) -> None:
        self._cancel = None
        if not self._is_cancelled:
            self._timer = self._loop.call_later(self._delays.response_s, self._reply, answer)

    def cancel_later(self) -> None:
        """Cancel the running request, after the delay of a cancellation."""
        self._is_cancelled = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.call_later(self._delays.cancel_s, self._stop)

    def _stop(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()


def _stream(handler: Any, delays: Delays) -> Any:
    """Return ``handler`` of ModelStreamInfer with its delays."""

    async def call(requests: AsyncIterator[Any], send: Callable[[bytes], Awaitable[None]], context: Any) -> None:
        async def delayed() -> AsyncIterator[Any]:
            async for request in requests:
                await asyncio.sleep(delays.request_s)
                yield request

        async def write(body: bytes) -> None:
            await asyncio.sleep(delays.response_s)
            await send(body)

        running = asyncio.ensure_future(handler(delayed(), write, context))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            try:
                await asyncio.sleep(delays.cancel_s)
            finally:
                running.cancel()
                await asyncio.wait((running,))
            raise
        await asyncio.sleep(delays.end_s)

    return call
