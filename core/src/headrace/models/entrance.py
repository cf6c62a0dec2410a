"""How requests get in: one place for every protocol, for models that ask models, and for the program itself.

::

    find    the model, by name and version; a decoupled one only where any number of responses is taken
    start   the interceptors, its check, and its scheduler
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeAlias

from headrace.errors import Cancelled, HeadraceError, InvalidArgument, Unsupported
from headrace.messages.caller import Caller
from headrace.messages.operation import Operation
from headrace.messages.ticket import Ticket
from headrace.models.interceptors import InterceptorChain
from headrace.models.view import ModelView
from headrace.schedulers.in_flight import show, write


class Start(Protocol):
    def __call__(self, view: ModelView, ticket: Ticket, call: Any = None) -> None: ...


#: Returns the `Caller` of a request, from what a frontend knows of the call that brought it.
Describe: TypeAlias = Callable[[Any, Ticket], Caller]


def program(call: Any, ticket: Ticket) -> Caller:
    """Return the caller of a request that the program makes that the server is part of."""
    return Caller("program")


def model(call: Any, ticket: Ticket) -> Caller:
    """Return the caller of a request that a model makes; its parent is the caller that the model answers."""
    return Caller("model", parent=ticket.request.sender)


def admitted(call: Any, ticket: Ticket) -> Caller:
    """Return the caller of a request whose frontend had it admitted, and kept it as ``call.caller``."""
    caller: Caller = call.caller
    return caller


#: Finds a model by name and version (empty: the latest). Raises `HeadraceError`.
Resolve: TypeAlias = Callable[[str, str], ModelView]


class Entrance:
    """One way in. Event loop only.

    ``single`` words the refusal of a decoupled model by its name, where the caller takes one response;
    None lets it pass. ``describe`` returns the `Caller` of a request; it is called only with an ``admission``.
    """

    __slots__ = ("_admission", "_describe", "_resolve", "_single", "_waiting", "find", "start")

    def __init__(
        self,
        resolve: Resolve,
        single: Callable[[str], HeadraceError] | None = None,
        describe: Describe = program,
        admission: InterceptorChain | None = None,
    ) -> None:
        self._resolve, self._single, self._describe = resolve, single, describe
        self._admission = admission
        #: Inferences that wait for an interceptor. The event loop itself keeps no task from the garbage collector.
        self._waiting: set[asyncio.Task[None]] = set()
        #: Returns the model for a name and a version. Raises `HeadraceError` if there is none, or this is no way to ask
        #: it.
        self.find: Resolve = resolve if single is None else self._find_single
        #: Checks the request of a ticket, made for a view, and hands it to the scheduler. Raises `HeadraceError` if it
        #: is refused; then it is not answered. The last argument is that of ``describe``.
        self.start: Start = start if admission is None else self._start_described

    def submit(self, ticket: Ticket, caller: Caller | None = None) -> ModelView:
        """`find` and `start`: for a request that took long to make, so that another version may serve by now.

        ``caller`` sent it.
        """
        view = self.find(ticket.request.model_name, ticket.request.model_version)
        if self._admission is None:
            start(view, ticket)
        else:
            sender = caller or getattr(ticket.request, "_sender", None)
            self._start_for(view, ticket, sender or self._describe(None, ticket))
        return view

    def _find_single(self, name: str, version: str) -> ModelView:
        view = self._resolve(name, version)
        if view.decoupled and self._single is not None:
            raise self._single(name)
        return view

    # ------------------------------------------------------------------ with interceptors

    def _start_described(self, view: ModelView, ticket: Ticket, call: Any = None) -> None:
        self._start_for(view, ticket, self._describe(call, ticket))

    def _start_for(self, view: ModelView, ticket: Ticket, caller: Caller) -> None:
        """Start the request of ``caller``. What no frontend had admitted to infer with this model is admitted here."""
        assert self._admission is not None
        name = ticket.request.model_name
        is_admitted = caller.operation in (Operation.INFER, Operation.GENERATE) and caller.model == name
        if is_admitted and not caller.is_over:
            self._intercept(view, ticket, caller)
            return
        if caller.operation is not None:
            caller = caller.for_another_operation()
        waiting = self._admission.admit(caller, Operation.INFER, name)
        if waiting is None:
            self._intercept(view, ticket, caller)
        else:
            task = asyncio.get_running_loop().create_task(self._wait(waiting, view, ticket, caller))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            ticket.on_cancel = partial(_stop_waiting, task)

    async def _wait(self, waiting: Coroutine[Any, Any, None], view: ModelView, ticket: Ticket, caller: Caller) -> None:
        """Start a request once the interceptors let it pass; a refusal is its answer."""
        try:
            await waiting
            ticket.on_cancel = None
            self._intercept(view, ticket, caller)
        except HeadraceError as error:
            write(ticket, error.with_traceback(None), True)
        except asyncio.CancelledError:
            ticket.on_cancel = None
            write(ticket, Cancelled(f"{ticket.request.log_id}request was cancelled"), True)

    def _intercept(self, view: ModelView, ticket: Ticket, caller: Caller) -> None:
        assert self._admission is not None
        others = len(ticket.watchers or ())
        try:
            self._admission.intercept(view, ticket, caller)
            start(view, ticket)
        except HeadraceError as error:
            show(ticket, error, True, others)
            caller.end(error)
            raise


def _stop_waiting(task: asyncio.Task[None], ticket: Ticket) -> None:
    task.cancel()


def start(view: ModelView, ticket: Ticket, call: Any = None) -> None:
    """Check ``ticket`` and hand it to the scheduler, which answers it. No interceptor sees it."""
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
