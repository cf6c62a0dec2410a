"""How requests get in: one place for every protocol, for models that ask models, and for the program itself.

::

    find    the model, by name and version; a decoupled one only where any number of responses is taken
    start   those who intercept (authorization, quotas, traces), its check, and its scheduler
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, InvalidArgument, Unsupported
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.models.view import ModelView
from headrace.schedulers.in_flight import show


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
        others = len(ticket.watchers or ())
        try:
            for interceptor in self._interceptors:
                watch = interceptor.intercept(ticket.request, view, caller)
                if watch is not None:
                    ticket.watch(partial(_tell, watch))
            self._start(view, ticket)
        except HeadraceError as error:
            show(ticket, error, True, others)
            raise


def _tell(watch: Watch, ticket: Ticket, answer: Answer, final: bool) -> Answer:
    watch(answer, final)
    return answer


class Start(Protocol):
    def __call__(self, view: ModelView, ticket: Ticket, call: Any = None, reply: Any = None) -> None: ...


#: What a frontend knows a request by, its call and its reply, as the `Caller` that it comes from.
Describe: TypeAlias = Callable[[Any, Any], Caller]


def program(call: Any, reply: Any) -> Caller:
    """A request of the program that the server is part of."""
    return Caller("program")


def model(call: Any, reply: Any) -> Caller:
    """A request of a model, whose execution ``InferRequest.callers`` names."""
    return Caller("model")


#: Finds a model by name and version (empty: the latest). Raises `HeadraceError`.
Resolve: TypeAlias = Callable[[str, str], ModelView]


class Entrance:
    """One way in. Event loop only.

    ``single`` words the refusal of a decoupled model by its name, where the caller takes one response;
    None lets it pass. ``describe`` makes the `Caller` of what `start` is given with a request; it is
    asked only where there are ``interceptors``.
    """

    __slots__ = ("_admit", "_describe", "_resolve", "_single", "find", "start")

    def __init__(
        self,
        resolve: Resolve,
        single: Callable[[str], HeadraceError] | None = None,
        describe: Describe = program,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self._resolve, self._single, self._describe = resolve, single, describe
        self._admit = Interception(interceptors, start) if interceptors else None
        #: The model for a name and a version. Raises `HeadraceError` if there is none, or this is no way to ask it.
        self.find: Resolve = resolve if single is None else self._find_single
        #: Has the request of a ticket, made for a view, checked and answered. Raises `HeadraceError` if it is refused;
        #: then it is not answered. What comes behind it are the two arguments of ``describe``.
        self.start: Start = start if self._admit is None else self._start_intercepted

    def submit(self, ticket: Ticket, caller: Caller | None = None) -> ModelView:
        """`find` and `start`: for a request that was long in the making, so that another version may serve by now.

        ``caller`` is what `caller` said of it before.
        """
        view = self.find(ticket.request.model_name, ticket.request.model_version)
        if self._admit is None:
            start(view, ticket)
        else:
            self._admit(view, ticket, caller or self._describe(None, None))
        return view

    def caller(self, call: Any, reply: Any) -> Caller | None:
        """Who sent a request, for `submit`; None where nobody asks."""
        return None if self._admit is None else self._describe(call, reply)

    def _find_single(self, name: str, version: str) -> ModelView:
        view = self._resolve(name, version)
        if view.decoupled and self._single is not None:
            raise self._single(name)
        return view

    def _start_intercepted(self, view: ModelView, ticket: Ticket, call: Any = None, reply: Any = None) -> None:
        assert self._admit is not None
        self._admit(view, ticket, self._describe(call, reply))


def start(view: ModelView, ticket: Ticket, call: Any = None, reply: Any = None) -> None:
    """Check ``ticket`` and hand it to the scheduler, which answers it. Nobody asks who sent it."""
    view.check(ticket)
    view.enqueue(ticket)


# ---------------------------------------------------------------------------
# How a decoupled model is refused to those who take one response
# ---------------------------------------------------------------------------


def not_over_http(name: str) -> HeadraceError:
    return Unsupported("HTTP end point doesn't support models with decoupled transaction policy")


def not_by_model_infer(name: str) -> HeadraceError:
    return Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")


def not_by_models(name: str) -> HeadraceError:
    return InvalidArgument(
        f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
        "calls for decoupled models.'"
    )


def not_by_infer(name: str) -> HeadraceError:
    return Unsupported(f"model '{name}' is decoupled: it may give any number of responses")
