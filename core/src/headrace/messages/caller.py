"""The caller of one operation: identity, transport, deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace.errors import HeadraceError, plugin_failure
from headrace.messages.operation import AnyOperation
from headrace.messages.response import Answer

log = logging.getLogger(__name__)

#: The headers of a W3C trace context (https://www.w3.org/TR/trace-context/).
_TRACE_HEADERS = ("traceparent", "tracestate")


class Outcome(NamedTuple):
    """The end of an operation: its ``error``, or None. The times are monotonic."""

    error: HeadraceError | None
    begun_ns: int
    ended_ns: int


class Watch:
    """Watches one operation that an `Interceptor` has admitted. Subclasses override the methods that they need."""

    #: True to be shown answers after `ended`, too: what a model has used for a caller that has left (`Call.used`).
    is_late: ClassVar[bool] = False

    def answered(self, answer: Answer, final: bool) -> None:
        """An inference has an answer, which the caller gets next. ``final`` is true for the last one."""

    def noted(self, details: Mapping[str, Any]) -> None:
        """A control operation is about to change something: the ``details`` of `Caller.note`."""

    def ended(self, outcome: Outcome) -> None:
        """The operation is over. Called once, after the last answer."""


def _no_header(name: str) -> str | None:
    return None


@dataclass(slots=True, eq=False)
class Caller:
    """The caller of one operation: identity, transport, headers, deadline. It travels with the request.

    ``transport`` is ``http``, ``grpc``, ``metrics``, the name of another frontend, ``model`` for a model that calls
    another model, or ``program`` for the program that the server is part of.
    """

    transport: str
    #: The address of the other end; empty if it is not known.
    peer: str = ""
    #: The verified certificate of the other end, as ``ssl.SSLSocket.getpeercert`` has it.
    certificate: Mapping[str, Any] | None = None
    #: Returns a header, or an entry of metadata that is text, by its name in lower case.
    header: Callable[[str], str | None] = _no_header
    #: Returns all headers, as names and values.
    headers: Callable[[], Iterable[tuple[str, str]]] = tuple
    #: The identity of the caller, until an interceptor sets it: the first common name of the certificate. Without one,
    #: its first URI as a subject alternative name, such as a SPIFFE id; without that, its first DNS name.
    principal: str = ""
    #: When the caller stops waiting, in monotonic nanoseconds; 0 for never.
    deadline_ns: int = 0
    #: The headers ``traceparent`` and ``tracestate``, if the caller sent them. Read on first use.
    trace_context: Mapping[str, str] = None  # type: ignore[assignment]
    #: The call that a model was executing when it made this one. Principal, deadline and trace context are copied from
    #: it.
    parent: Caller | None = None
    #: The size of the message of the operation as it is when `Interceptor.admit` is called: over HTTP before it is
    #: decompressed. 0 if it is not known then, and for a stream as a whole.
    body_bytes: int = 0
    #: The operation and the model that it was admitted for. None and empty before; ``model`` is also empty if the
    #: operation has no model.
    operation: AnyOperation | None = field(default=None, init=False)
    model: str = field(default="", init=False)
    arrival_ns: int = field(default_factory=monotonic_ns, init=False)
    #: Set by a `Watch`: called after the end, when a frontend has handed a whole answer to its transport.
    on_sent: Callable[[], None] | None = field(default=None, init=False, repr=False)
    is_over: bool = field(default=False, init=False)
    #: Set by a frontend that calls `end` with its reply: the last answer then does not end the operation.
    ends_with_reply: bool = field(default=False, init=False, repr=False)
    #: True if a `Watch` gets the answers, and not the end only.
    shows_answers: bool = field(default=False, init=False, repr=False)
    _watches: tuple[Watch, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if (parent := self.parent) is not None:
            self.principal = self.principal or parent.principal
            self.deadline_ns = self.deadline_ns or parent.deadline_ns
            self.trace_context = self.trace_context or parent.trace_context
        if self.certificate and not self.principal:
            self.principal = _holder(self.certificate)
        if not self.trace_context:
            del self.trace_context  # few operations have one, and few read it

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Mapping[str, str]:
            """Read the trace context."""
            if name != "trace_context":
                raise AttributeError(f"a Caller has no attribute {name!r}")
            headers = {header: value for header in _TRACE_HEADERS if (value := self.header(header))}
            self.trace_context = headers
            return headers

    def for_another_operation(self) -> Caller:
        """Return the same caller for an operation that is part of this one, such as the inference of a chat."""
        return Caller(
            self.transport,
            self.peer,
            self.certificate,
            self.header,
            self.headers,
            self.principal,
            self.deadline_ns,
            self.trace_context,
            self,
        )

    # ------------------------------------------------------------------ for admission and for frontends

    @property
    def is_watched(self) -> bool:
        """True if the operation has a `Watch`."""
        return bool(self._watches)

    def watch(self, watch: Watch) -> None:
        """Pass the answers and the end to ``watch``."""
        self._watches = (*self._watches, watch)
        if type(watch).answered is not Watch.answered:
            self.shows_answers = True

    def note(self, **details: Any) -> None:
        """Pass the requested changes of a control operation to the watches: no contents of files, no secrets."""
        for watch in self._watches:
            watch.noted(details)

    def answered(self, answer: Answer, final: bool) -> None:
        """Pass an answer to the watches, the last interceptor first."""
        for watch in reversed(self._watches):
            try:
                watch.answered(answer, final)
            except BaseException as error:
                log.error("an interceptor failed at an answer", exc_info=plugin_failure(error))

    def end(self, error: HeadraceError | None = None) -> None:
        """End the operation; only the first call counts."""
        if self.is_over:
            return
        self.is_over = True
        watches, self._watches = self._watches, ()
        if not watches:
            return
        if self.shows_answers:
            self._watches = tuple([watch for watch in watches if watch.is_late])
        outcome = Outcome(error, self.arrival_ns, monotonic_ns())
        for watch in reversed(watches):
            try:
                watch.ended(outcome)
            except BaseException as error:
                log.error("an interceptor failed at the end of an operation", exc_info=plugin_failure(error))


def _holder(certificate: Mapping[str, Any]) -> str:
    """Return the name in ``certificate`` that `Caller.principal` describes; empty if there is none."""
    names = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
    names += certificate.get("subjectAltName", ())
    return next((name for kind in ("commonName", "URI", "DNS") for key, name in names if key == kind and name), "")
