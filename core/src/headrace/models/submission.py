"""Submission of requests: the same code for every protocol, for models that call models, and for `headrace.Server`.

::

    find    the model, by name and version; refuses a decoupled one if the caller takes one response
    start   interceptors, check, model queue
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeAlias

from headrace.errors import Cancelled, HeadraceError, InternalError, InvalidArgument, Unsupported
from headrace.messages.caller import Caller
from headrace.messages.operation import Operation
from headrace.messages.ticket import Ticket
from headrace.models.interceptors import InterceptorChain
from headrace.models.view import ModelView
from headrace.schedulers.in_flight import call_watchers, write
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)


class Start(Protocol):
    def __call__(self, view: ModelView, ticket: Ticket, call: Any = None) -> None: ...


#: Returns the `Caller` of a request from the frontend's own call object.
Describe: TypeAlias = Callable[[Any, Ticket], "Caller | None"]


def program_caller(call: Any, ticket: Ticket) -> Caller:
    """Return the caller of a request from the program that runs the server."""
    return Caller("program")


def model_caller(call: Any, ticket: Ticket) -> Caller:
    """Return the caller of a request from a model. Its parent is the caller of the request that the model executes."""
    return Caller("model", parent=ticket.request.sender)


def admitted_caller(call: Any, ticket: Ticket) -> Caller | None:
    """Return the caller that a frontend kept as ``call.caller``; None if all interceptors leave out the request."""
    return getattr(call, "caller", None)


#: Finds a model by name and version (empty: the latest). Raises `HeadraceError`.
Resolve: TypeAlias = Callable[[str, str], ModelView]


class RequestSubmitter:
    """Submits the requests of one kind of caller. Event loop only.

    ``refusal`` returns the error that refuses a decoupled model, for a caller that takes one response; None allows it.
    ``describe`` returns the `Caller` of a request, or None. It is called only if there is an ``admission``.
    """

    __slots__ = ("_admission", "_describe", "_follows_sender", "_refusal", "_resolve", "_waiting", "find", "start")

    def __init__(
        self,
        resolve: Resolve,
        refusal: Callable[[str], HeadraceError] | None = None,
        describe: Describe = program_caller,
        admission: InterceptorChain | None = None,
    ) -> None:
        self._resolve, self._refusal, self._describe = resolve, refusal, describe
        self._admission = admission
        #: True if requests of models are left out if the request that they execute was.
        self._follows_sender = describe is model_caller and admission is not None and admission.is_selective
        #: Requests that wait for an interceptor. The event loop itself keeps no reference to their tasks.
        self._waiting: set[asyncio.Task[None]] = set()
        #: Returns the model for a name and a version. Raises `HeadraceError` if there is none, or if it is decoupled
        #: and this caller takes one response.
        self.find: Resolve = resolve if refusal is None else self._find_single
        #: Checks the request of a ticket and passes it to the model queue: ``start(view, ticket, call)``. Raises
        #: `HeadraceError` if it is refused; it is then not answered. If an interceptor waits, this returns at once, and
        #: a later refusal is the answer. ``call`` is for ``describe``.
        self.start: Start = check_and_enqueue if admission is None else self._start_described

    def without_admission(self) -> RequestSubmitter:
        """Return a submitter of the same requests, for those that all interceptors leave out."""
        return RequestSubmitter(self._resolve, self._refusal)

    def submit(self, ticket: Ticket, caller: Caller | None = None) -> ModelView:
        """`find` and `start` a request that took long to create: another version may be the latest by now.

        ``caller`` has sent it.
        """
        view = self.find(ticket.request.model_name, ticket.request.model_version)
        if self._admission is None:
            check_and_enqueue(view, ticket)
        else:
            sender = caller or getattr(ticket.request, "_sender", None)
            self._start_for(view, ticket, sender or self._describe(None, ticket))
        return view

    def _find_single(self, name: str, version: str) -> ModelView:
        view = self._resolve(name, version)
        if view.decoupled and self._refusal is not None:
            raise self._refusal(name)
        return view

    # ------------------------------------------------------------------ with interceptors

    def _start_described(self, view: ModelView, ticket: Ticket, call: Any = None) -> None:
        is_left_out = self._follows_sender and ticket.request.sender is None
        self._start_for(view, ticket, None if is_left_out else self._describe(call, ticket))

    def _start_for(self, view: ModelView, ticket: Ticket, caller: Caller | None) -> None:
        """Start the request of ``caller``. If it was not admitted for an inference with this model, admit it here."""
        assert self._admission is not None
        name = ticket.request.model_name
        if caller is None:
            if not self._admission.is_selective:
                raise InternalError(f"the request to model '{name}' has passed no interceptor")
            check_and_enqueue(view, ticket)
            return
        is_admitted = caller.operation in (Operation.INFER, Operation.GENERATE) and caller.model == name
        if is_admitted and not caller.is_over:
            self._intercept(view, ticket, caller)
            return
        chain = self._admission.taking(caller, Operation.INFER, name)
        if chain is None:
            check_and_enqueue(view, ticket)
            return
        if caller.operation is not None:
            caller = caller.for_another_operation()
        waiting = chain.admit(caller, Operation.INFER, name)
        if waiting is None:
            self._intercept(view, ticket, caller)
        else:
            task = asyncio.get_running_loop().create_task(self._wait(waiting, view, ticket, caller))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            ticket.on_cancel = partial(_stop_waiting, task)

    async def _wait(self, waiting: Coroutine[Any, Any, None], view: ModelView, ticket: Ticket, caller: Caller) -> None:
        """Start a request when the interceptors allow it. If they refuse, answer it with the error."""
        try:
            await waiting
            if ticket.cancelled:
                raise asyncio.CancelledError
            ticket.on_cancel = None
            self._intercept(view, ticket, caller)
        except HeadraceError as error:
            write(ticket, error.with_traceback(None), True)
        except asyncio.CancelledError as error:
            ticket.on_cancel = None
            refusal: HeadraceError = Cancelled(f"{ticket.request.log_id}request was cancelled")
            if not ticket.cancelled:  # by code of an interceptor
                log.error("an interceptor raised an exception at the operation '%s'", caller.operation, exc_info=error)
                refusal = InternalError("the request failed inside the server; its log has the reason")
            caller.end(refusal)
            write(ticket, refusal, True)

    def _intercept(self, view: ModelView, ticket: Ticket, caller: Caller) -> None:
        assert self._admission is not None
        others = len(ticket.watchers or ())
        try:
            self._admission.intercept(view, ticket, caller)
            check_and_enqueue(view, ticket)
        except HeadraceError as error:
            call_watchers(ticket, error, True, others)
            caller.end(error)
            raise


def _stop_waiting(task: asyncio.Task[None], ticket: Ticket) -> None:
    task.get_loop().call_soon(task.cancel)  # not before it has started, or it would answer nothing


def check_and_enqueue(view: ModelView, ticket: Ticket, call: Any = None) -> None:
    """Check ``ticket`` and pass it to the model queue, which answers it. No interceptor is called."""
    view.check(ticket)
    view.enqueue(ticket)


# ---------------------------------------------------------------------------
# How a decoupled model is refused to callers that take one response
# ---------------------------------------------------------------------------


def refuse_decoupled_http(name: str) -> HeadraceError:
    return Unsupported("HTTP end point doesn't support models with decoupled transaction policy")


def refuse_decoupled_model_infer(name: str) -> HeadraceError:
    return Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")


def refuse_decoupled_call(name: str) -> HeadraceError:
    return InvalidArgument(
        f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
        "calls for decoupled models.'"
    )


def refuse_decoupled_infer(name: str) -> HeadraceError:
    return Unsupported(f"model '{name}' is decoupled: it may give any number of responses")
