"""Admission: every operation of every protocol passes the interceptors, in one place.

::

    admit       before the body is read: may refuse, wait, name the principal, and watch the operation
    intercept   when the request of an inference has been read: may refuse it, or replace it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, InternalError, plugin_errors, plugin_failure
from headrace.messages.caller import Caller, Watch
from headrace.messages.operation import AnyOperation, Operation
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import Recorder
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.published import Publisher

if TYPE_CHECKING:
    from headrace.models.view import ModelView

log = rate_limited_logger(__name__)
#: The module of callers imports nothing else of the server, so its log is set up here.
rate_limited_logger("headrace.messages.caller")

#: The result of `Interceptor.admit`.
Verdict: TypeAlias = "Watch | None"
#: A handler of a protocol, with three arguments.
Handler: TypeAlias = Callable[[Any, Any, Any], Any]
#: See `Interceptor.permits` and `Interceptor.meters`.
Permits: TypeAlias = Mapping[Any, Mapping[str, str]]
Meters: TypeAlias = Mapping["tuple[str | tuple[str], str]", "Meter"]


class Meter(ABC):
    """Counts the inferences of one principal with one model that pass without `Interceptor.admit`. Event loop only."""

    __slots__ = ()

    @abstractmethod
    def begin(self, model: ModelView, size_bytes: int) -> bool:
        """Count an inference with a message of ``size_bytes``. Return False to have it admitted: it is not counted."""

    @abstractmethod
    def end(self) -> None:
        """Note the last answer of an inference that was begun. Called once for each, also after a disconnect."""

    @abstractmethod
    def take_back(self, size_bytes: int) -> None:
        """Do not count the inference that was just begun: it is admitted instead. Called in place of `end`."""


class Interceptor(ABC):
    """Decides about every operation of every protocol. One object per server.

    A server without one pays nothing for it. Everything here runs on the event loop and must not block.
    """

    name: ClassVar[str]
    #: True for one that only watches. It is before all others, so that it watches their refusals, too.
    first: ClassVar[bool] = False
    #: True for a control mode. It is after all others, so that it loads nothing for a refused caller.
    last: ClassVar[bool] = False

    def __init__(self, options: ServerOptions) -> None:
        self.options = options

    @property
    def enabled(self) -> bool:
        """True if ``options`` enable this interceptor. Read once, before the server starts."""
        return True

    #: Takes the records of finished inferences. It replaces `admit` and `intercept` for an inference over HTTP or by
    #: ModelInfer that no other interceptor takes, unless it is a rare one, such as a large one or one that is refused.
    recorder: Recorder | None = None
    #: Inferences over HTTP and by ModelInfer that pass without a call of `admit` and `intercept`: the principal, by the
    #: header ``authorization``, as bytes (HTTP) and as text (gRPC), and by the model. May change at any time. Without
    #: that header by ``(header, value)``, if it has an attribute ``header``, such as ``b"x-api-key"``. Without both by
    #: the ``id`` of ``Caller.certificate``, to which it must then keep a reference.
    permits: Permits | None = None
    #: Counts such inferences without a call of `admit` and `intercept`: by principal, or address in a tuple for a
    #: caller without one, and model. Those that are not in it are admitted. May change at any time.
    meters: Meters | None = None
    #: True if `samples` reads ``traceparent``.
    follows_trace_context: bool = False
    #: The inferences that are left out next, without a call of `samples` unless they have a trace context that is
    #: followed. Set by `samples`, counted down by core.
    spared: int = 0

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        """Return False to leave an operation out: `admit` is then not called. Not called for operations of models.

        If all interceptors leave out an inference, not even its `Caller` is made. ``model`` returns the name of the
        model. ``traceparent`` is the header of that name, empty unless `follows_trace_context`.
        """
        return True

    @abstractmethod
    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Verdict | Awaitable[Verdict]:
        """Allow an operation, before its body is read, or raise a `HeadraceError` to refuse it.

        ``model`` is empty for an operation without a model, or if the name is in the body. Return a `Watch` to get the
        answers and the end. Return an awaitable to wait: it is awaited, and the caller waits. Set ``caller.principal``
        to name the principal for later interceptors and for models. Any other exception is logged, and refuses the
        operation.
        """

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        """Return another request for the same model, made from this one. Return None to keep ``request``.

        Called for every inference that was admitted, after its body was read, before it is checked and queued. Raise a
        `HeadraceError` to refuse it.
        """
        return None

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        """Note that an interceptor refused an operation by ``error``. Called even if `samples` has left it out."""

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str | None:
        """Return who may do ``operation`` over ``transport``, such as ``"callers with a key"``, for ``headrace check
        --security``. An empty string is everybody. None: this interceptor does not decide it."""
        return None

    def publishers(self) -> Iterable[tuple[dict[str, str], Publisher]]:
        """Return parts with metrics for the page, each with its labels. Called once per scrape."""
        return ()


class InterceptorChain:
    """The interceptors of a server, in order. Event loop only."""

    #: For chains with several samplers: none of them is counted down without a question.
    spared = 0

    def __init__(self, interceptors: Sequence[Interceptor], is_decided: bool = False) -> None:
        """Create the chain. If ``is_decided``, all ``interceptors`` take the operation: `samples` of none is called."""
        self._interceptors = self.interceptors = tuple(interceptors)
        self._readers = [each for each in interceptors if type(each).intercept is not Interceptor.intercept]
        self._samplers = [each for each in interceptors if type(each).samples is not Interceptor.samples]
        self._notified = [each for each in interceptors if type(each).refused is not Interceptor.refused]
        self.follows_trace_context = any(each.follows_trace_context for each in self._samplers)
        self.recorder = next((each.recorder for each in interceptors if each.recorder is not None), None)
        recorders = [each for each in interceptors if each.recorder is not None]
        #: True if no interceptor needs a `Caller` for every inference: each samples or records.
        self.is_selective = len(recorders) < 2 and all(
            each in self._samplers or each in recorders for each in interceptors
        )
        self._has_quick_ways = len(recorders) < 2 and all(
            each in self._samplers or each in recorders or each.permits is not None or each.meters is not None
            for each in interceptors
        )
        self._chains: dict[tuple[Interceptor, ...], InterceptorChain] = {}
        if is_decided:
            self._samplers = []

    def select(
        self,
        admitted: Callable[..., Any],
        left_out: Handler,
        recorded: Callable[..., Handler] | None,
        traceparent: Callable[[Any, Any], str],
        model: Callable[[Any, Any], str],
        permitted: Callable[..., Handler] | None = None,
    ) -> Handler:
        """Return a handler of inferences that calls another one, with its own arguments:

        ::

            left_out                        no interceptor takes the inference
            permitted(otherwise, *ways)     only those with these ways do: `Permits` or None, then `Meters` if there are
                                            any; ``otherwise`` admits
            recorded(recorder, otherwise)   only one with this recorder does. With ``*ways`` also those that have them
            partial(admitted, chain)        those of ``chain`` do. Without ``recorded``, also for a recorder

        ``traceparent`` and ``model`` read the first two arguments.
        """
        handlers: dict[InterceptorChain | None, Handler] = {None: left_out}

        def handler_of(chain: InterceptorChain | None) -> Handler:
            if chain is not None and chain not in handlers:
                handlers[chain] = admit = partial(admitted, chain)
                ways: list[Any] = [each.permits for each in chain._interceptors if each.permits is not None]
                metering = [each for each in chain._interceptors if each.meters is not None]
                others, is_quick = len(chain._interceptors) - len(ways) - len(metering), len(ways) < 2
                if metering:  # they count by the principal that the permits name
                    is_quick &= len(metering) == 1 and all(each.permits is None for each in chain._after(metering[0]))
                    ways = [*(ways or [None]), metering[0].meters]
                if recorded is not None and chain.recorder is not None and others == 1 and is_quick:
                    handlers[chain] = recorded(chain.recorder, admit, *ways)
                elif permitted is not None and ways and not others and is_quick:
                    handlers[chain] = permitted(admit, *ways)
            return handlers[chain]

        if not self._has_quick_ways:
            return handler_of(self)
        spared = handler_of(self._only(tuple(each for each in self._interceptors if each not in self._samplers)))
        if not self._samplers:
            return spared
        sampler: Interceptor | InterceptorChain = self._samplers[0] if len(self._samplers) == 1 else self

        def ask(first: Any, second: Any, third: Any, sent: str = "") -> Any:
            takers = self._takers(Operation.INFER, partial(model, first, second), sent)
            return handler_of(self._only(takers))(first, second, third)

        def choose(first: Any, second: Any, third: Any) -> Any:
            if sampler.spared:
                sampler.spared -= 1
                return spared(first, second, third)
            return ask(first, second, third)

        def choose_by_context(first: Any, second: Any, third: Any) -> Any:
            sent = traceparent(first, second)
            return ask(first, second, third, sent) if sent else choose(first, second, third)

        return choose_by_context if self.follows_trace_context else choose

    def _after(self, interceptor: Interceptor) -> Sequence[Interceptor]:
        return self._interceptors[self._interceptors.index(interceptor) :]

    def _only(self, takers: tuple[Interceptor, ...]) -> InterceptorChain | None:
        """Return the chain of ``takers``, which take the operation; None if there are none."""
        if takers and takers not in self._chains:
            self._chains[takers] = InterceptorChain(takers, is_decided=True)
            self._chains[takers]._notified = self._notified
        return self._chains.get(takers)

    def _takers(self, operation: AnyOperation, model: Callable[[], str], sent: str) -> tuple[Interceptor, ...]:
        samplers = self._samplers
        return tuple(
            [each for each in self._interceptors if each not in samplers or each.samples(operation, model, sent)]
        )

    def taking(self, caller: Caller, operation: AnyOperation, model: str) -> InterceptorChain | None:
        """Return the chain of the interceptors that take the operation; None if there are none."""
        if not self._samplers or caller.transport == "model":
            return self
        sent = caller.trace_context.get("traceparent", "") if self.follows_trace_context else ""
        return self._only(self._takers(operation, lambda: model, sent))

    def admit(self, caller: Caller, operation: AnyOperation, model: str = "") -> Coroutine[Any, Any, None] | None:
        """Call all interceptors. Return None if the operation is allowed. Else await the result: then it is allowed.

        Raises the error that refuses it; `Caller.end` has then been called. If it is allowed, `Caller.end` must be
        called later. A `CancelledError` of the awaited result is the caller's or an interceptor's: the task that awaits
        it decides, and then calls `Caller.end`.
        """
        caller.operation, caller.model = operation, model
        chain = self.taking(caller, operation, model) if self._samplers else self
        asking = iter(() if chain is None else chain._interceptors)
        try:
            for interceptor in asking:
                verdict: Any = interceptor.admit(caller, operation, model)
                if isinstance(verdict, Watch):
                    caller.watch(verdict)
                elif verdict is not None:
                    if isawaitable(verdict):
                        return self._wait(caller, operation, model, interceptor, verdict, asking)
                    _take(caller, interceptor, verdict)
        except BaseException as error:
            raise self._refusal(caller, operation, plugin_failure(error)) from None
        return None

    async def _wait(
        self,
        caller: Caller,
        operation: AnyOperation,
        model: str,
        interceptor: Interceptor,
        verdict: Any,
        asking: Iterable[Interceptor],
    ) -> None:
        """Await the ``verdict`` of ``interceptor``, and call the remaining ones."""
        try:
            _take(caller, interceptor, await verdict)
            for interceptor in asking:
                result = interceptor.admit(caller, operation, model)
                _take(caller, interceptor, await result if isawaitable(result) else result)
        except BaseException as error:
            raise self._refusal(caller, operation, plugin_failure(error, has_left=True)) from None

    def intercept(self, view: ModelView, ticket: Ticket, caller: Caller) -> None:
        """Pass the request of ``ticket``, which was admitted, to the interceptors, and its answers to the watches.

        Raises the error that refuses it.
        """
        try:
            for interceptor in self._readers:
                replaced = interceptor.intercept(ticket.request, view, caller)
                if replaced is not None:
                    if replaced.model_name != ticket.request.model_name:
                        raise TypeError(f"interceptor '{interceptor.name}' made a request for another model")
                    ticket.request = replaced
        except BaseException as error:
            raise self._refusal(caller, Operation.INFER, plugin_failure(error)) from None
        ticket.request.send_as(caller)
        if caller.shows_answers or (caller.is_watched and not caller.ends_with_reply):
            ticket.watch(partial(_notify_watches, caller))

    def _refusal(self, caller: Caller, operation: AnyOperation, error: Exception) -> HeadraceError:
        """Return the error that refuses the operation. An interceptor that fails refuses everything."""
        if not isinstance(error, HeadraceError):
            log.error("an interceptor raised an exception at the operation '%s'", operation, exc_info=error)
            error = InternalError("the request failed inside the server; its log has the reason")
        for interceptor in self._notified:
            interceptor.refused(caller, error)
        caller.end(error)
        return error


def make_interceptors(kinds: Iterable[type[Interceptor]], options: ServerOptions) -> InterceptorChain | None:
    """Return the interceptors that ``options`` enable, in order; None if there are none."""
    ordered = sorted(kinds, key=lambda kind: (kind.last, not kind.first))
    interceptors = []
    for kind in ordered:
        with plugin_errors(f"interceptor '{kind.name}' cannot start"):
            interceptor = kind(options)
            interceptors += [interceptor] if interceptor.enabled else []
    return InterceptorChain(interceptors) if interceptors else None


def _notify_watches(caller: Caller, ticket: Ticket, answer: Answer, final: bool) -> Answer:
    """Pass an answer to the watches of the operation, which ends with the last one."""
    caller.answered(answer, final)
    if final:
        caller.end(answer if isinstance(answer, HeadraceError) else None)
    return answer


def _take(caller: Caller, interceptor: Interceptor, verdict: object) -> None:
    if isinstance(verdict, Watch):
        caller.watch(verdict)
    elif verdict is not None:
        raise TypeError(f"interceptor '{interceptor.name}' returned {verdict!r}, which is neither a Watch nor None")
