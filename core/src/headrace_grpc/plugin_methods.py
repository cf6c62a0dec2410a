"""gRPC methods of extensions, of any service.

::

    class Ping(GrpcMethod):
        name = "/acme.Health/Ping"
        operation = ExtensionOperation("ping", "health")

        async def answer(self, request: bytes, caller: Caller) -> bytes:
            return request
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from google.protobuf.message import DecodeError

from headrace.engine import AnyOperation, Caller
from headrace.errors import CallerError, Code, HeadraceError, plugin_failure
from headrace.frontends.extension import Addition, check_operation, require_async
from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_grpc.rpc import Answer, Context, Rpc, Send, caller_of, serialize

if TYPE_CHECKING:
    from headrace_grpc.infer import Inference
    from headrace_grpc.wire import Buffer

_NAME = re.compile(r"/((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)/([A-Za-z_]\w*)", re.ASCII)


class MethodServices(NamedTuple):
    """The objects that the methods of one server share, and the names of all its services."""

    inference: Inference
    services: Sequence[str]


class GrpcMethod(Addition):
    """Answers the calls of one method. One object per server; it runs on the event loop and must not block.

    ``name`` is the path on the wire: ``"/package.Service/Method"``. A subclass has ``answer``, for one request and one
    response, or ``stream``, for any number of both. Interceptors admit ``operation`` before the first message is
    parsed.
    """

    kind: ClassVar[str] = "method"
    operation: ClassVar[AnyOperation]
    #: Number and name of the field of the parsed message that names a model, for interceptors. Not with ``stream``.
    model_field: ClassVar[tuple[int, str] | None] = None

    @staticmethod
    def parse(message: bytes) -> Any:
        """Return the request, such as ``MyRequest.FromString(message)``. The default is the bytes.

        Any exception is answered as a message that cannot be parsed. Called on a thread for large messages.
        """
        return message

    async def answer(self, request: Any, caller: Caller) -> bytes | Any:
        """Return the response: bytes, or a protobuf message.

        Cancelled when the caller disconnects. A `HeadraceError` is answered with its code, another exception with
        INTERNAL.
        """
        raise NotImplementedError

    def stream(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        """Yield the responses, each as from `answer`.

        The next one is asked for when the client's transport has taken the one before. Closed when the caller
        disconnects.
        """
        raise NotImplementedError

    def rpc(self, services: MethodServices) -> Rpc:
        """Return the `Rpc` that calls `answer` or `stream`."""
        service, method = read_name(type(self))
        how: dict[str, Any] = {"stream": self._stream} if _has(type(self), "stream") else {"unary": self._answer}
        return Rpc(
            service,
            method,
            self.operation,
            self._parse,
            **how,
            parse_large=self._parse_large,
            model_field=self.model_field,
        )

    @classmethod
    def check(cls) -> None:
        read_name(cls)
        check_operation(cls, getattr(cls, "operation", None))
        if cls.rpc is GrpcMethod.rpc and _has(cls, "answer") == _has(cls, "stream"):
            raise TypeError(f"method '{cls.name}' has to have either 'answer' or 'stream'")
        require_async(cls, "answer")
        if _has(cls, "stream") and iscoroutinefunction(cls.stream):
            raise TypeError(f"'stream' of method '{cls.name}' is a coroutine: it has to yield, or return an iterator")
        if _has(cls, "stream") and cls.model_field is not None:
            raise TypeError(
                f"method '{cls.name}' has 'stream' and 'model_field': a stream is admitted before its first message"
            )

    def _parse(self, body: Buffer) -> Any:
        if len(body) > LARGE_BYTES:
            raise TooLargeForLoop
        return self._parse_large(body)

    def _parse_large(self, body: Buffer) -> Any:
        try:
            return self.parse(bytes(body))
        except (HeadraceError, DecodeError, KeyboardInterrupt):
            raise
        except BaseException:
            raise CallerError("Unable to parse request", Code.INTERNAL) from None

    async def _answer(self, request: Any, context: Context) -> Answer:
        try:
            answer: Answer = await self.answer(request, caller_of(context))
        except Exception:
            raise
        except BaseException as error:
            raise plugin_failure(error, context.has_left) from error
        return answer

    async def _stream(self, requests: AsyncIterator[Any], send: Send, context: Context) -> None:
        responses = self.stream(requests, caller_of(context))
        try:
            async for response in responses:
                await send(serialize(response))
        except Exception:
            raise
        except BaseException as error:
            raise plugin_failure(error, context.has_left) from error
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(responses, "aclose", None)
            if close is not None:
                await close()


class RpcWrapper(Addition):
    """Wraps the handlers of every RPC of the server, own ones and those of plugins. Asked once per RPC, at start.

    The interceptors admit a call before the wrapped handler gets it.
    """

    kind: ClassVar[str] = "wrapper"

    def wrap(self, rpc: Rpc) -> Rpc:
        """Return ``rpc`` with another handler of the same kind, or ``rpc``."""
        raise NotImplementedError

    @classmethod
    def check(cls) -> None:
        if cls.wrap is RpcWrapper.wrap:
            raise TypeError(f"wrapper '{cls.name}' has no method 'wrap'")


def read_name(part: type[GrpcMethod]) -> tuple[str, str]:
    """Return the service and the method of ``part``. Raises TypeError if its name is invalid."""
    found = _NAME.fullmatch(part.name)
    if found is None:
        raise TypeError(f"method {part.__name__} is named {part.name!r}, not '/package.Service/Method'")
    return found[1], found[2]


def _has(part: type[GrpcMethod], member: str) -> bool:
    return getattr(part, member) is not getattr(GrpcMethod, member)
