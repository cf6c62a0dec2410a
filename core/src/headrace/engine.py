"""The server, for its frontends.

::

    view = submitter.find(name, version)      submitter = engine.submitter(refuse_decoupled_http), once
    ticket = Ticket(request, respond)        receives the answers; can also cancel the request
    submitter.start(view, ticket)

A frontend translates: bytes to an `InferRequest`, answers to bytes, and documents to the form of its protocol.
Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from time import monotonic_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from headrace.config.options import ServerOptions
from headrace.errors import Cancelled, HeadraceError, Unavailable, plugin_errors
from headrace.messages.caller import Caller, Outcome, Watch
from headrace.messages.operation import AnyOperation, ExtensionOperation, Operation
from headrace.messages.request import InferRequest, with_strings_encoded
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import ticket_of
from headrace.models.control_mode import ControlMode, holding
from headrace.models.interceptors import Interceptor, InterceptorChain, Meter, Meters, Permits
from headrace.models.open_streams import OpenStreams
from headrace.models.serving_table import ServingTable
from headrace.models.states import IndexEntry, index_of
from headrace.models.submission import (
    Describe,
    RequestSubmitter,
    admitted_caller,
    program_caller,
    refuse_decoupled_http,
    refuse_decoupled_model_infer,
)
from headrace.models.view import ModelView, statistics_document
from headrace.off_loop import OffLoopWork
from headrace.telemetry.executions import Recorder

if TYPE_CHECKING:
    from prometheus_client import Metric

    from headrace.models.control import Control
    from headrace.models.lifecycle import Lifecycle
    from headrace.telemetry.logs import Log

log = logging.getLogger(__name__)

__all__ = [
    "AnyOperation",
    "Caller",
    "Engine",
    "ExtensionOperation",
    "IndexEntry",
    "Interceptor",
    "InterceptorChain",
    "Metadata",
    "Meter",
    "Meters",
    "ModelView",
    "Operation",
    "Outcome",
    "Permits",
    "Phase",
    "Recorder",
    "RequestSubmitter",
    "Watch",
    "admitted_caller",
    "refuse_decoupled_http",
    "refuse_decoupled_model_infer",
]

#: The order in which Triton lists its extensions (docs/spec/behaviours.md section 1.6).
_TRITONS_ORDER = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
#: A kind of addition of extensions: routes, methods.
A = TypeVar("A")


class Phase(Enum):
    """The phases of a server. FAILED: it has no repository, and runs because of its options."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    EXITING = "exiting"
    STOPPED = "stopped"


class Metadata(NamedTuple):
    """The metadata of the server."""

    name: str
    version: str
    extensions: list[str]


class Engine:
    """Requests and control operations of one server, for its frontends.

    The server creates it, sets ``phase``, and sets ``control``, ``lifecycle`` and ``version`` before the first frontend
    starts.
    """

    control: Control
    lifecycle: Lifecycle
    version: str

    def __init__(
        self,
        options: ServerOptions,
        table: ServingTable,
        collect: Callable[[], Iterable[Metric]] = tuple,
        admission: InterceptorChain | None = None,
    ) -> None:
        """Create the engine. ``collect`` returns the present metrics of the models, in the form of Prometheus."""
        self.options = options
        self.phase = Phase.NEW
        #: The threads on which frontends read and write large messages.
        self.off_loop_work = OffLoopWork()
        self.collect = collect
        self._table = table
        #: All operations pass it. None if the server has no interceptors.
        self.admission = admission
        #: The classes of the extensions. Iterating raises `LoadError` if two of them add the same.
        self.extension_parts: Iterable[type[Any]] = ()
        #: Returns the host of a protocol, a class, as ``--http-server`` and ``--grpc-server`` choose it.
        self.host: Callable[[str], type[Any]]
        #: The control mode of a plugin, if the options choose one.
        self.mode: ControlMode | None = None
        self._any_number = self.submitter()
        #: The open streams of decoupled models, for all protocols.
        self.streams = OpenStreams()
        #: The log that the command line has opened; None in a program that configures logging itself.
        self.log: Log | None = None
        #: Applies a change to the extension of a name in all servers on the same ports; None for a single server.
        self.relay: Callable[[str, str, Any, bool], Awaitable[None]] | None = None
        self._when_ready: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ admission

    async def admit(self, caller: Caller, operation: AnyOperation, model: str = "") -> None:
        """Return when ``caller`` may do ``operation``, on ``model`` if that is known. Raises the error that refuses it.

        Every frontend must call this for every operation, before it reads the body. `Caller.end` must follow. A caller
        that was admitted to `Operation.INFER` is not admitted again by `responses`.
        """
        if self.admission is not None and (waiting := self.admission.admit(caller, operation, model)) is not None:
            try:
                await waiting
            except asyncio.CancelledError:
                caller.end(Cancelled("the caller has disconnected"))
                raise

    # ------------------------------------------------------------------ extensions

    @cached_property
    def extensions(self) -> list[Any]:
        """The extensions that are enabled, created on first use. Raises `LoadError` if two add the same."""
        made = []
        for part in self.extension_parts:
            with plugin_errors(f"extension '{part.name}' cannot start"):
                extension = part(self)
                made += [extension] if extension.enabled else []
        return made

    def additions(self, kind: type[A]) -> list[A]:
        """Return what the extensions add to the protocol that serves ``kind``: a new object of each class."""
        return [part(extension) for extension in self.extensions for part in extension.adds if issubclass(part, kind)]

    async def share(self, extension: Any, key: str, change: Any, is_kept: bool = True) -> None:
        """Apply ``change`` to ``extension`` by its ``apply``: in this server, and in every one of ``--workers``.

        ``change`` is a value that JSON can express. All changes are applied one after the other, in the same order
        everywhere. A server that starts later applies the last change of each ``key`` before it listens, unless that
        was not ``is_kept``. Raises the `HeadraceError` of ``apply``.
        """
        if self.relay is None:
            await extension.apply(change)
        else:
            await self.relay(extension.name, key, change, is_kept)

    def close_extensions(self) -> None:
        """Close the extensions, once. Only the server calls this. If one fails, the others are still closed."""
        for extension in self.__dict__.get("extensions", ()):
            try:
                extension.close()
            except Exception:
                log.exception("extension '%s' failed to close", extension.name)

    # ------------------------------------------------------------------ inference

    def submitter(
        self, refusal: Callable[[str], HeadraceError] | None = None, describe: Describe = program_caller
    ) -> RequestSubmitter:
        """Return a `RequestSubmitter` for requests from outside. Create it once; ``refusal`` and ``describe`` as in
        `RequestSubmitter`."""
        return RequestSubmitter(self._table.resolve, refusal, describe, self.admission)

    def resolve(self, name: str, version: str | int = "") -> ModelView:
        """Return the model for ``name`` and ``version`` (empty: the latest ready one).

        Raises `InvalidArgument` for a version that is not a number, `NotFound` or `Unavailable`.
        """
        return self._table.resolve(name, version)

    @overload
    def responses(self, request: InferRequest, caller: Caller | None = None) -> AsyncIterator[InferResponse]: ...

    @overload
    def responses(
        self, request: InferRequest, caller: Caller | None, with_errors: Literal[True]
    ) -> AsyncIterator[InferResponse | HeadraceError]: ...

    async def responses(
        self, request: InferRequest, caller: Caller | None = None, with_errors: bool = False
    ) -> AsyncIterator[Any]:
        """Yield the responses of a model to ``request``, when they are asked for.

        A model that is `UNREAD` responses ahead waits. Inputs of type BYTES may be arrays of ``str`` or ``bytes``, as
        for `headrace.Server.infer`. The request is submitted at the first response, as from ``caller``. Closing the
        iterator cancels it.

        Raises `HeadraceError` if the model does not exist, refuses or fails, and `Unavailable` at the request's
        deadline. If ``with_errors``, an error of a decoupled model is yielded, and the responses after it, too.
        """
        answers: deque[tuple[Answer, bool]] = deque()
        arrived = asyncio.Event()

        def respond(answer: Answer, final: bool) -> None:
            answers.append((answer, final))
            arrived.set()

        def end(reason: Unavailable) -> None:
            respond(reason, True)

        ticket = ticket_of(with_strings_encoded(request), respond)
        async with holding(self.mode, request.model_name):
            view = self._any_number.submit(ticket, caller)
        if view.decoupled:
            self.streams.add(end)
        deadline_ns, timer = request.deadline_ns, None
        if deadline_ns:
            left_s = max(0, deadline_ns - monotonic_ns()) / 1e9
            expired = Unavailable("Request timeout expired")  # Triton's text for a queue
            timer = asyncio.get_running_loop().call_later(left_s, respond, expired, True)
        try:
            while True:
                while answers:
                    answer, final = answers.popleft()
                    if isinstance(answer, HeadraceError) and (final or not with_errors):
                        try:
                            raise answer
                        finally:
                            del answer  # the error and this frame, which has the request, would keep each other
                    if answer is not None:
                        yield answer
                    if final:
                        return
                    ticket.read()
                arrived.clear()
                await arrived.wait()
        finally:
            self.streams.discard(end)
            if timer is not None:
                timer.cancel()
            ticket.cancel()

    # ------------------------------------------------------------------ health

    @property
    def is_loading(self) -> bool:
        """True while the models of the start are being loaded."""
        return self.phase is Phase.STARTING

    @property
    def live(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY)

    @property
    def exiting(self) -> bool:
        return self.phase in (Phase.EXITING, Phase.STOPPED)

    @property
    def ready(self) -> bool:
        """True if the server is ready. Strict unless ``strict_readiness`` is off. Calls no ``is_ready``.

        Source: docs/spec/behaviours.md section 5.6.
        """
        if self.phase is not Phase.READY:
            return False
        return not self.options.strict_readiness or self.lifecycle.are_settled

    @property
    def has_checks(self) -> bool:
        """True if `check_ready` may call an ``is_ready``, and so may have to wait."""
        return self.options.strict_readiness and any(model.has_checks for model in self._table.all_ready())

    async def check_ready(self) -> bool:
        """True if `ready`, and with strict readiness also the ``is_ready`` of each instance."""
        if not self.ready or not self.options.strict_readiness:
            return self.ready
        return all(await asyncio.gather(*(model.check_ready() for model in self._table.all_ready())))

    def why_not_alive(self, name: str = "", version: str | int = "") -> str:
        """Return in one line why an instance of the model is dead; without a name, of any model for strict readiness.

        Empty if all are alive, or if the server is not serving. Raises as `resolve`.
        """
        if name:
            return self._table.served(name, version).why_not_alive
        is_asked = self.phase is Phase.READY and self.options.strict_readiness
        return self.lifecycle.why_not_alive if is_asked else ""

    def is_model_alive(self, name: str, version: str | int = "") -> bool | None:
        """True if every instance of the model is alive; None if an ``is_ready`` must be called, as `check_model` does.

        Raises as `resolve`.
        """
        if self._is_loadable(name):
            return True
        model = self._table.served(name, version)
        return None if model.has_checks else model.ready

    async def check_model(self, name: str, version: str | int = "") -> bool:
        """True if `is_model_alive`, and the ``is_ready`` of each instance. Raises as `resolve`."""
        return self._is_loadable(name) or await self._table.served(name, version).check_ready()

    async def is_model_ready(self, name: str, version: str | int = "") -> bool:
        """True if that version (empty: the latest) would take requests; False if there is none.

        Raises `InvalidArgument` for a version that is not a number.
        """
        return self._is_loadable(name) or await self._table.is_ready(self._table.served, name, version)

    def _is_loadable(self, name: str) -> bool:
        """True if ``name`` does not serve, and the control mode of a plugin would load it for a request."""
        is_served = self.mode is None or self.phase is not Phase.READY or self.lifecycle.is_served(name)
        return not is_served and self.mode is not None and self.mode.is_ready(name)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` when requests are taken: now, or when the models are loaded."""
        if self.phase in (Phase.NEW, Phase.STARTING):
            self._when_ready.append(call)
        else:
            call()

    def notify_ready(self) -> None:
        """Make the calls of `when_ready`. The server calls this once."""
        for call in self._when_ready:
            call()

    # ------------------------------------------------------------------ documents

    def metadata(self) -> Metadata:
        names = dict.fromkeys(name for extension in self.extensions for name in extension.announces)
        ordered = [name for name in _TRITONS_ORDER if name in names]
        ordered += [name for name in names if name not in _TRITONS_ORDER]
        return Metadata(self.options.id, self.version, ordered)

    def model_metadata(self, name: str, version: str | int = "") -> dict[str, Any]:
        """Return the metadata of a model, with all its ready versions or the requested one. Raises as `resolve`."""
        view = self.resolve(name, version)
        versions = [view.version] if version else self._table.ready_versions(name)
        return {"name": view.name, "versions": [str(number) for number in versions], **view.metadata}

    def statistics(self, name: str, version: str | int) -> list[dict[str, Any]]:
        """Return a document for each requested version; for an empty ``name``, for all ready models.

        Raises `InvalidArgument` for a version that is not ready, and `Unavailable` before the end of the start.
        """
        table = self._table
        table.require_open()
        models = table.for_statistics(name, version) if name else table.all_ready()
        return [statistics_document(model.name, model.version, model.snapshot()) for model in models]

    def explain(self, name: str, version: str | int = "") -> dict[str, Any]:
        """Return why the last batches of a model ran when they did. docs/explain.md lists the fields. Raises as
        `resolve`."""
        return self._table.served(name, version).explain()

    # ------------------------------------------------------------------ control

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return every known model version, sorted."""
        records = self.lifecycle.records
        return [entry for name in sorted(records) for entry in index_of(records[name], ready_only)]

    async def list_repository(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return `index`; in control mode ``explicit`` also the models of the repository that were never loaded.

        Raises `Unavailable` before the end of the start.
        """
        self._table.require_open()
        return await self.control.index(ready_only)

    async def load(self, name: str, parameters: Mapping[str, str | bytes] = MappingProxyType({})) -> None:
        """Load or reload ``name`` in control mode ``explicit``. Return when it serves.

        ``parameters`` may have ``config``, JSON that replaces the config file, and ``file:<path>``, contents that
        replace the model's files (docs/spec/behaviours.md section 5.4). Raises `HeadraceError`; the old versions then
        stay.
        """
        self._require_ready()
        await self.control.load(name, parameters)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload ``name`` in control mode ``explicit``. Return when it takes no more requests.

        Its requests are answered in the background. With ``unload_dependents``, the models that it needs are unloaded,
        too, unless others need them or they were loaded by name. Raises `HeadraceError`; an unknown name is no error.
        """
        self._require_ready()
        await self.control.unload(name, unload_dependents)

    async def register_repository(self, url: str, names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Add a repository in control mode ``explicit``; nothing is loaded.

        ``names`` has the directories of its models by the names under which they are served; empty for all models by
        their own names. Raises `AlreadyExists` for a repository or a name that is there, `NotFound`, `Unsupported`.
        """
        self._require_ready()
        await self.control.register(url, names)

    async def unregister_repository(self, url: str) -> None:
        """Remove a repository of `register_repository`. Its loaded models stay loaded; the others are removed from the
        index.

        Raises `NotFound`, `Unsupported`.
        """
        self._require_ready()
        await self.control.unregister(url)

    def _require_ready(self) -> None:
        self._table.require_open()
        if self.phase is not Phase.READY:
            raise Unavailable("Server not ready")
