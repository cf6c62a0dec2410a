"""What sees requests on their way in and answers on their way out, in any protocol: authorization, quotas, traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from headrace.errors import HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Respond, Ticket
from headrace.models.view import ModelView
from headrace.telemetry.pacing import paced

if TYPE_CHECKING:
    from headrace.config.options import ServerOptions

log = paced(__name__)


def _no_header(name: str) -> str | None:
    return None


@dataclass(slots=True)
class Caller:
    """Who sent a request. ``via`` is how: ``http``, ``grpc``, another frontend, ``model``, or the server's ``program``.

    ``peer`` is the address of the other end, empty where that is not known, and ``certificate`` what
    it proved itself with, as ``ssl.SSLSocket.getpeercert`` has it. ``header`` looks up a header, or an
    entry of metadata that is text, by its name in lower case. ``principal`` is who that is: the common
    name of the certificate, until an interceptor knows better and says so to those behind it.
    """

    via: str
    peer: str = ""
    certificate: Mapping[str, Any] | None = None
    header: Callable[[str], str | None] = _no_header
    principal: str = ""

    def __post_init__(self) -> None:
        for names in (self.certificate or {}).get("subject", ()) if not self.principal else ():
            self.principal = dict(names).get("commonName", self.principal)


class Interceptor(ABC):
    """Sees every inference request, and the answers of those that it wants to see. One object per server.

    A server without one pays nothing for it. Everything here runs on the event loop, and must not block.
    """

    name: ClassVar[str]

    def __init__(self, options: ServerOptions) -> None:
        self.options = options

    @abstractmethod
    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> Watch | None:
        """Before ``request`` is checked and queued. Raise a `HeadraceError` to refuse it.

        What is returned is called with each answer before the caller gets it, and whether it is the
        last; also if the request is refused behind this interceptor. A raise of it is logged.
        """


#: Takes an answer, and whether it is the last.
Watch: TypeAlias = Callable[[Answer, bool], None]


class Interception:
    """Has a request seen by all interceptors, in order, and then started by ``start``."""

    __slots__ = ("_interceptors", "_start")

    def __init__(self, interceptors: Sequence[Interceptor], start: Callable[[ModelView, Ticket], None]) -> None:
        self._interceptors, self._start = interceptors, start

    def __call__(self, view: ModelView, ticket: Ticket, caller: Caller) -> None:
        watches: list[Watch] = []
        respond = ticket.respond
        try:
            for interceptor in self._interceptors:
                watch = interceptor.intercept(ticket.request, view, caller)
                if watch is not None:
                    watches.append(watch)
            if watches:
                ticket.respond = _Watched(watches, respond)
            self._start(view, ticket)
        except HeadraceError as error:
            ticket.respond = respond
            _tell(watches, error, True)
            raise


class _Watched:
    """Shows the answers of one request, innermost interceptor first, and passes them on."""

    __slots__ = ("_respond", "_watches")

    def __init__(self, watches: Sequence[Watch], respond: Respond) -> None:
        self._watches, self._respond = watches, respond

    def __call__(self, answer: Answer, final: bool) -> None:
        _tell(self._watches, answer, final)
        self._respond(answer, final)


def _tell(watches: Sequence[Watch], answer: Answer, final: bool) -> None:
    for watch in reversed(watches):
        try:
            watch(answer, final)
        except Exception:
            log.exception("an interceptor failed at an answer")
