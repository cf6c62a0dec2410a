"""What a frontend may ask of the server, and nothing else.

::

    view = entrance.find(name, version)      entrance = engine.entrance(not_over_http), once
    ticket = Ticket(request, respond)        to whom the answers come; it cancels the request, too
    entrance.start(view, ticket)

A frontend translates: bytes to an `InferRequest`, answers to bytes, and documents to what its protocol
calls them. Everything here is for the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from time import monotonic_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, PluginError, Unavailable
from headrace.large import LargeWork
from headrace.messages.caller import Caller, Outcome, Watch
from headrace.messages.operation import AnyOperation, ExtensionOperation, Operation
from headrace.messages.request import InferRequest, with_strings_encoded
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.entrance import Describe, Entrance, admitted, not_by_model_infer, not_over_http, program
from headrace.models.interceptors import Interceptor, InterceptorChain
from headrace.models.open_streams import OpenStreams
from headrace.models.serving_table import ServingTable
from headrace.models.states import IndexEntry, index_of
from headrace.models.view import ModelView, statistics_document

if TYPE_CHECKING:
    from prometheus_client import Metric

    from headrace.models.control import Control
    from headrace.models.lifecycle import Lifecycle

log = logging.getLogger(__name__)

__all__ = [
    "AnyOperation",
    "Caller",
    "Engine",
    "Entrance",
    "ExtensionOperation",
    "IndexEntry",
    "Interceptor",
    "InterceptorChain",
    "Metadata",
    "ModelView",
    "Operation",
    "Outcome",
    "Phase",
    "Watch",
    "admitted",
    "not_by_model_infer",
    "not_over_http",
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
#: A kind of what extensions add: routes, methods.
A = TypeVar("A")


class Phase(Enum):
    """The life of a server. One that has FAILED found no repository, and runs because it is told to."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    EXITING = "exiting"
    STOPPED = "stopped"


class Metadata(NamedTuple):
    """Of the server."""

    name: str
    version: str
    extensions: list[str]


class Engine:
    """The data plane and the control plane of one server, for its frontends.

    The server makes it, says in ``phase`` how far its life has come, and gives it ``control``,
    ``lifecycle`` and ``version`` before the first frontend starts.
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
        """``collect`` gives what is measured of the models now, as Prometheus has it."""
        self.options = options
        self.phase = Phase.NEW
        #: What frontends read and write away from the event loop.
        self.large_work = LargeWork()
        self.collect = collect
        self._table = table
        #: What every operation passes; None if the server has no interceptors.
        self.admission = admission
        #: The classes of the extensions. Iterating raises `LoadError` if two of them add the same.
        self.extension_parts: Iterable[type[Any]] = ()
        self._any_number = self.entrance()
        #: Those of decoupled models, whatever protocol they are asked by.
        self.streams = OpenStreams()
        self._when_ready: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ admission

    async def admit(self, caller: Caller, operation: AnyOperation, model: str = "") -> None:
        """Return once ``caller`` may do ``operation``, on ``model`` if that is known. Raises what refuses it.

        To be called by every frontend, for every operation, before it reads the body. `Caller.end` must follow. What
        was admitted to `Operation.INFER` is not asked for again by `responses`.
        """
        if self.admission is not None and (waiting := self.admission.admit(caller, operation, model)) is not None:
            await waiting

    # ------------------------------------------------------------------ extensions

    @cached_property
    def extensions(self) -> list[Any]:
        """The extensions that are enabled, made when first asked for. Raises `LoadError` if two add the same."""
        made = []
        for part in self.extension_parts:
            try:
                made.append(part(self))
            except HeadraceError:
                raise
            except Exception as error:
                raise PluginError(f"extension '{part.name}' can not start: {type(error).__name__}: {error}") from error
        return [extension for extension in made if extension.enabled]

    def additions(self, kind: type[A]) -> list[A]:
        """Return what the extensions add to the protocol that serves ``kind``: a new object of each class."""
        return [part(extension) for extension in self.extensions for part in extension.adds if issubclass(part, kind)]

    def close_extensions(self) -> None:
        """Close the extensions. The server's to call, once. One that fails keeps no other open."""
        for extension in self.__dict__.get("extensions", ()):
            try:
                extension.close()
            except Exception:
                log.exception("extension '%s' failed to close", extension.name)

    # ------------------------------------------------------------------ inference

    def entrance(self, single: Callable[[str], HeadraceError] | None = None, describe: Describe = program) -> Entrance:
        """A way in for requests from outside, to be made once; ``single`` and ``describe`` as `Entrance` has them."""
        return Entrance(self._table.resolve, single, describe, self.admission)

    def resolve(self, name: str, version: str | int = "") -> ModelView:
        """The model for ``name`` and ``version`` (empty for the latest ready one).

        Raises `InvalidArgument` for a version that is no number, `NotFound` or `Unavailable`.
        """
        return self._table.resolve(name, version)

    async def responses(self, request: InferRequest, caller: Caller | None = None) -> AsyncIterator[InferResponse]:
        """Yield the responses of a model to ``request``, each when it is asked for.

        A model that is `UNREAD` responses ahead waits.

        Inputs of type BYTES may be arrays of ``str`` or ``bytes``, as `headrace.Server.infer` takes them.

        The request is submitted with the first, as that of ``caller``. Whoever stops asking cancels it. Raises
        `HeadraceError` where the model is not there, refuses, or fails, and `Unavailable` at the request's deadline.
        """
        answers: deque[tuple[Answer, bool]] = deque()
        arrived = asyncio.Event()

        def respond(answer: Answer, final: bool) -> None:
            answers.append((answer, final))
            arrived.set()

        def end(reason: Unavailable) -> None:
            respond(reason, True)

        ticket = Ticket(with_strings_encoded(request), respond)
        view = self._any_number.submit(ticket, caller)
        if view.decoupled:
            self.streams.add(end)
        deadline_ns, timer = request.deadline_ns, None
        if deadline_ns:
            left_s = max(0, deadline_ns - monotonic_ns()) / 1e9
            expired = Unavailable("Request timeout expired")  # in the words that Triton has for a queue
            timer = asyncio.get_running_loop().call_later(left_s, respond, expired, True)
        try:
            while True:
                while answers:
                    answer, final = answers.popleft()
                    if isinstance(answer, HeadraceError):
                        try:
                            raise answer
                        finally:
                            del answer  # it and this frame, which has the request, would keep each other
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
        """Whether the models of the start are still being loaded."""
        return self.phase is Phase.STARTING

    @property
    def live(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY)

    @property
    def exiting(self) -> bool:
        return self.phase in (Phase.EXITING, Phase.STOPPED)

    @property
    def ready(self) -> bool:
        """docs/spec/behaviours.md section 5.6; strict unless ``strict_readiness`` is off. Asks no instance."""
        if self.phase is not Phase.READY:
            return False
        return not self.options.strict_readiness or self.lifecycle.are_settled

    @property
    def has_checks(self) -> bool:
        """Whether `check_ready` may have to ask an instance, and so to wait."""
        return self.options.strict_readiness and any(model.has_checks for model in self._table.all_ready())

    async def check_ready(self) -> bool:
        """`ready`, and with strict readiness what the instances that have an ``is_ready`` say now."""
        if not self.ready or not self.options.strict_readiness:
            return self.ready
        return all(await asyncio.gather(*(model.check_ready() for model in self._table.all_ready())))

    def why_not_alive(self, name: str = "", version: str | int = "") -> str:
        """Return why an instance of the model is not alive, in one line; without a name, of any model that strict
        readiness counts. Empty if all are alive, or if the server is not serving. Raises as `resolve`."""
        if name:
            return self._table.served(name, version).why_not_alive
        is_asked = self.phase is Phase.READY and self.options.strict_readiness
        return self.lifecycle.why_not_alive if is_asked else ""

    def is_model_alive(self, name: str, version: str | int = "") -> bool | None:
        """Whether every instance of the model is alive; None if some must be asked, as `check_model` does.

        Raises as `resolve`.
        """
        model = self._table.served(name, version)
        return None if model.has_checks else model.ready

    async def check_model(self, name: str, version: str | int = "") -> bool:
        """`is_model_alive`, and what the instances that have an ``is_ready`` say now. Raises as `resolve`."""
        return await self._table.served(name, version).check_ready()

    async def is_model_ready(self, name: str, version: str | int = "") -> bool:
        """Whether requests to that version (empty: the latest) would be taken; False if there is none.

        Raises `InvalidArgument` for a version that is no number.
        """
        return await self._table.is_ready(self._table.served, name, version)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` once requests are taken: now, or when the models are loaded."""
        if self.phase in (Phase.NEW, Phase.STARTING):
            self._when_ready.append(call)
        else:
            call()

    def tell_ready(self) -> None:
        """Make the calls of `when_ready`. The server's to call, once."""
        for call in self._when_ready:
            call()

    # ------------------------------------------------------------------ documents

    def metadata(self) -> Metadata:
        names = dict.fromkeys(name for extension in self.extensions for name in extension.announces)
        ordered = [name for name in _TRITONS_ORDER if name in names]
        ordered += [name for name in names if name not in _TRITONS_ORDER]
        return Metadata(self.options.id, self.version, ordered)

    def model_metadata(self, name: str, version: str | int = "") -> dict[str, Any]:
        """The metadata of a model, with all its ready versions or the one asked for. Raises as `resolve`."""
        view = self.resolve(name, version)
        versions = [view.version] if version else self._table.ready_versions(name)
        return {"name": view.name, "versions": [str(number) for number in versions], **view.metadata}

    def statistics(self, name: str, version: str | int) -> list[dict[str, Any]]:
        """A document for each version asked for; an empty ``name`` asks for all that is ready.

        Raises `InvalidArgument` for a version that is not ready, and `Unavailable` before the start is over.
        """
        table = self._table
        table.require_open()
        models = table.for_statistics(name, version) if name else table.all_ready()
        return [statistics_document(model.name, model.version, model.snapshot()) for model in models]

    def explain(self, name: str, version: str | int = "") -> dict[str, Any]:
        """Why the last batches of a model ran when they did; docs/explain.md has the fields. Raises as `resolve`."""
        return self._table.served(name, version).explain()

    # ------------------------------------------------------------------ control

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, sorted."""
        records = self.lifecycle.records
        return [entry for name in sorted(records) for entry in index_of(records[name], ready_only)]

    async def list_repository(self, ready_only: bool = False) -> list[IndexEntry]:
        """`index`, and in control mode ``explicit`` the models of the repository that were never loaded.

        Raises `Unavailable` before the start is over.
        """
        self._table.require_open()
        return await self.control.index(ready_only)

    async def load(self, name: str, parameters: Mapping[str, str | bytes] = MappingProxyType({})) -> None:
        """Load or reload ``name`` in control mode ``explicit``; returns when it serves.

        ``parameters`` may hold ``config``, JSON that takes the place of the config file, and
        ``file:<path>``, the contents of files that take the place of the model's directory
        (docs/spec/behaviours.md section 5.4). Raises `HeadraceError`; then the old versions go on.
        """
        self._require_ready()
        await self.control.load(name, parameters)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload ``name`` in control mode ``explicit``; returns once it takes no more requests.

        What it has is answered in the background. ``unload_dependents`` has what an ensemble needs unloaded with it,
        unless others need it or it was loaded by name. Raises `HeadraceError`; an unknown name is no error.
        """
        self._require_ready()
        await self.control.unload(name, unload_dependents)

    def _require_ready(self) -> None:
        self._table.require_open()
        if self.phase is not Phase.READY:
            raise Unavailable("Server not ready")
