"""The base class of all gRPC hosts: its RPCs, its port, its start, how it reads a message and words an error."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from google.protobuf.message import DecodeError

from headrace.errors import CallerError, Code, HeadraceError, InternalError
from headrace.frontends.base import LAST_WORDS_S, Frontend, callers_s
from headrace.memory_release import share_heap
from headrace.off_loop import TooLargeForLoop
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_grpc.infer import OUT_OF_TIME, SHUTTING_DOWN
from headrace_grpc.rpc import Rpc
from headrace_grpc.rpc_table import rpcs
from headrace_grpc.status import PUSHBACK, details, pushback_ms, status_of
from headrace_grpc.wire import COUNTED_BYTES
from headrace_hosts.held_memory import budget_of, no_memory
from headrace_hosts.listening import announce, listen_grpc, shown_address
from headrace_hosts.tls_files import TlsFiles, grpc_tls

log = logging.getLogger(__name__)
_paced_log = rate_limited_logger(f"{__name__}.calls")

#: Messages of this size on, of which a library and we have a copy each, leave enough memory to give back.
_RELEASE_BYTES = 1 << 20


class GrpcHost(Frontend):
    """KServe v2 over gRPC. A subclass accepts connections, and answers their calls by the handlers of `rpcs`.

    ``--grpc-server`` names the host that a server runs. ``port`` is the one that is listened on, once started.
    """

    protocol: ClassVar[str] = "grpc"
    #: The text, with UNAVAILABLE, for a new call once the server stops; and for a call that is not answered by its end.
    shutting_down: ClassVar[str] = SHUTTING_DOWN
    out_of_time: ClassVar[str] = OUT_OF_TIME
    port: int = 0

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_grpc

    @property
    def shares_port(self) -> bool:
        return self.engine.options.reuse_grpc_port

    async def start(self) -> None:
        """Listen. Raises `Unavailable` naming a busy address, and `ConfigError` for the TLS files."""
        self.port = await self.serve()
        announce(self.engine, log, "GRPCInferenceService", f"{self.engine.options.grpc_address}:{self.port}")

    @abstractmethod
    async def serve(self) -> int:
        """Listen on the address and the port of the options, and return the port. Raises as `start`.

        Calls are answered in the background until `stop`. That refuses new calls, ends streams that ask for nothing,
        and answers the calls in flight. A call that is not answered soon after ``exit_timeout_secs``, or when it is
        cancelled, ends with UNAVAILABLE and `out_of_time`.
        """

    # ------------------------------------------------------------------ what a subclass needs

    @cached_property
    def rpcs(self) -> Sequence[Rpc]:
        """The RPCs of the server. Each names the interceptors' operation, and its handler admits the call."""
        return rpcs(self.engine)

    @property
    def tls(self) -> TlsFiles | None:
        """The files of ``--grpc-server-cert`` and the flags beside it; None without TLS."""
        return grpc_tls(self.engine.options)

    @property
    def address(self) -> str:
        """The address and port of the options, as log lines show them."""
        options = self.engine.options
        return shown_address(options.grpc_address, options.grpc_port)

    def require_free(self) -> None:
        """Raise `Unavailable` if the address can not be bound. For a library that does not say why it can not."""
        options = self.engine.options
        listen_grpc(options.grpc_address, options.grpc_port, is_shared=False, listens=False).close()

    @property
    def callers_s(self) -> float:
        """The seconds of a stop that callers may use to send or to read."""
        return callers_s(self.engine.options.exit_timeout_secs)

    @property
    def stop_s(self) -> float:
        """After how many seconds a stop is over: the server cancels it soon after."""
        return self.engine.options.exit_timeout_secs + LAST_WORDS_S

    def reader(self, rpc: Rpc) -> Callable[[bytes], Coroutine[Any, Any, Any]]:
        """Return what makes the request of ``rpc`` of a message. It reads large messages on a thread."""
        parse, parse_large = rpc.parse, rpc.parse_large or rpc.parse
        large, budget = self.engine.off_loop_work, budget_of(self.engine)

        async def read(body: bytes) -> Any:
            if len(body) >= _RELEASE_BYTES:
                large.release_memory_later()
            counted = body if len(body) <= COUNTED_BYTES else budget.count_body(body)
            del body
            try:
                return parse(counted)
            except TooLargeForLoop:
                return await large.run(partial(parse_large, counted))

        return read

    def status(self, reason: Exception) -> tuple[int, str]:
        """Return the status, as a number of gRPC, and the details of a call that ends by ``reason``.

        What is no `HeadraceError` is logged and not shown.
        """
        if isinstance(reason, DecodeError):
            reason = CallerError("Unable to parse request", Code.INTERNAL)
        if isinstance(reason, MemoryError):
            reason = no_memory("the server has no memory for the call")
        if not isinstance(reason, HeadraceError):
            _paced_log.error("a gRPC handler failed", exc_info=reason)
            reason = InternalError("internal error; the server's log has the details")
        return status_of(reason), details(reason.message)

    def advice(self, reason: Exception) -> tuple[tuple[str, str], ...]:
        """Return the trailers, beside status and details, of a call that ends by ``reason``."""
        pushback = pushback_ms(reason) if isinstance(reason, HeadraceError) else None
        return () if pushback is None else ((PUSHBACK, str(pushback)),)

    def share_heap(self) -> None:
        """Let threads that a library starts from here on share the heaps that are there.

        Else each has its own, and the memory that it frees stays with the process.
        """
        share_heap()
