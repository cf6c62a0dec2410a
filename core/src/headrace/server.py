"""The server: options, plugins, repository and models put together.

Everything that carries a request runs on one event loop, in the thread that awaits `Server.start`;
``with Server(...)`` provides such a thread. Instances run on threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from importlib.metadata import version as distribution_version
from os import PathLike, fspath
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import numpy.typing as npt
from anyio.from_thread import BlockingPortal, start_blocking_portal

from headrace.config import support
from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError, InternalError, NotFound, Unavailable, Unsupported
from headrace.frontends import disclosure
from headrace.frontends.base import Frontend
from headrace.frontends.large import LargeWork
from headrace.messages.request import InferRequest, Parameter
from headrace.messages.response import Answer, InferResponse
from headrace.messages.single import AwaitedAnswer
from headrace.messages.tensor import BytesTensor, as_tensor
from headrace.models.calls import Calls
from headrace.models.control import Control
from headrace.models.directory import Directory
from headrace.models.lifecycle import Lifecycle
from headrace.models.load_slots import LoadSlots, NestedLoads
from headrace.models.loading import Loader
from headrace.models.served import ServedModel
from headrace.models.services import ServerServices
from headrace.models.states import IndexEntry, index_of
from headrace.plugins import Plugins
from headrace.telemetry import settings
from headrace.telemetry.custom import CustomMetrics
from headrace.telemetry.summaries import Summaries
from headrace.workers.crossing import Crossing

log = logging.getLogger(__name__)

#: Server metadata, in Triton's order (docs/spec/behaviours.md section 1.6); grows as extensions are built.
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


#: After the time to stop is over: for the last answers to leave, and again for what is cancelled to end.
FAREWELL_S = 0.5


class Phase(Enum):
    """The life of a server. One that has FAILED found no repository, and runs because it is told to."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    EXITING = "exiting"
    STOPPED = "stopped"


class Metadata(NamedTuple):
    name: str
    version: str
    extensions: list[str]


class Server:
    """Serves a model repository: ``Server("models")``, or ``Server(ServerOptions(...))``.

    In a script, ``with Server("models") as server`` and `infer`. In async code, ``async with`` and
    `infer_async`. No port is opened unless `start_frontends` is awaited, before `start` or after it.
    """

    def __init__(self, repository: str | PathLike[str] | ServerOptions, **options: Any) -> None:
        """``options`` are fields of `ServerOptions`, when ``repository`` is a path.

        Raises `ConfigError` for an option whose feature is not built and that it would be wrong to
        ignore, and for an option of a plugin that is required and missing.
        """
        if not isinstance(repository, ServerOptions):
            repository = ServerOptions(model_repository=(fspath(repository),), **options)
        support.refuse(repository)
        disclosure.learn(repository.model_repository)
        self.phase = Phase.NEW
        self.plugins = Plugins.discover(repository.plugins)
        self.options = replace(repository, plugin_options=self.plugins.read_options(repository.plugin_options))
        self.metrics = settings.parse(self.options.metrics_config)
        self.summaries = Summaries() if self.metrics.summary_latencies else None
        if self.summaries is not None:
            self.plugins.register(self.summaries)
        self.custom_metrics = CustomMetrics()
        self.frontends: list[Frontend] = []
        self.loop: asyncio.AbstractEventLoop
        #: What frontends read and write away from the event loop.
        self.large_work = LargeWork()
        self._directory = Directory()
        self._lifecycle: Lifecycle
        self._control: Control
        self._version = ""
        self._when_ready: list[Callable[[], None]] = []
        self._portal: contextlib.AbstractContextManager[BlockingPortal] | None = None
        self.resolve = self._directory.resolve

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Load what the model control mode says is to be loaded at start.

        Raises `HeadraceError` if a model fails or there is no repository, and ``exit_on_error`` is set.
        """
        await self._begin()
        try:
            await self._load_first()
            if self.phase is Phase.STARTING:
                self._directory.open()
                self.plugins.hook.server_started(server=self)
                self.phase = Phase.READY
        except BaseException:
            await self.stop()
            raise
        if not self.exiting:
            for call in self._when_ready:
                call()

    async def start_frontends(self) -> None:
        """Listen on every enabled protocol that is not listened on yet.

        Before `start` as well as after it: until the models are loaded, health, metadata and metrics are
        answered, and what is asked of models is refused. One that `Frontend.shares_port` is left for a
        call after `start`. Raises `Unavailable` naming a port that is in use, and `LoadError` for two
        frontends of one name.
        """
        parts = [part for part in self.plugins.frontends if part not in map(type, self.frontends)]
        await self._begin()
        for frontend in [part(self) for part in parts]:
            if frontend.enabled and not (frontend.shares_port and self.is_loading):
                await frontend.start()
                self.frontends.append(frontend)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` once requests are taken: now, or when the models are loaded. On the event loop."""
        if self.phase in (Phase.NEW, Phase.STARTING):
            self._when_ready.append(call)
        else:
            call()

    async def _begin(self) -> None:
        """Put together what loads and answers, once."""
        if self.phase is not Phase.NEW:
            return
        self.loop = asyncio.get_running_loop()
        self.phase = Phase.STARTING
        options, plugins, directory = self.options, self.plugins, self._directory
        for complaint in plugins.complaints:
            log.warning("%s", complaint)
        slots = LoadSlots(options.model_load_thread_count)
        calls = Calls(self.loop, directory.resolve_loaded)
        services = ServerServices(Crossing(self.loop), calls, self, NestedLoads(slots), self.custom_metrics)
        loader = Loader(options, plugins, self.loop, services.crew)
        self._lifecycle = Lifecycle(loader, directory, slots, options.model_load_retry_count)
        self._control = Control(options, self._lifecycle)
        self._version = await asyncio.to_thread(distribution_version, "headrace")  # reads files

    async def _load_first(self) -> None:
        """Load what is to be loaded at start. Without a repository the server has failed."""
        exit_on_error = self.options.exit_on_error
        try:
            failures = await self._control.start()
        except HeadraceError as error:
            if exit_on_error:
                raise
            log.error("%s", error.message)
            self.phase, self._directory.refusal = Phase.FAILED, "Server not ready"
            return
        if failures and exit_on_error:
            raise InternalError("failed to load all models")

    async def stop(self, *, wait_for_loads: bool = True) -> None:
        """Answer what is in flight, close the frontends, unload everything.

        Takes at most ``exit_timeout_secs``; raises `Unavailable` when that was not enough. Then every
        model has been ended at once: what it still had is answered `Unavailable`, and nothing begins
        any more. Without ``wait_for_loads``, models that are being loaded are left behind, to be ended
        with the process.
        """
        if self.phase in (Phase.NEW, Phase.EXITING, Phase.STOPPED):
            return
        self.phase = Phase.EXITING
        self._control.stop()
        self._lifecycle.stopping()
        self.plugins.tell("server_stopping", server=self)
        draining = asyncio.ensure_future(self._drain(wait_for_loads))
        try:
            done, _ = await asyncio.wait((draining,), timeout=self.options.exit_timeout_secs)
            if not done:
                self._lifecycle.close()
                await asyncio.wait((draining,), timeout=FAREWELL_S)
                raise Unavailable("Exit timeout expired. Exiting immediately.")
            draining.result()
        finally:
            if not draining.done():
                draining.cancel()
                await asyncio.wait((draining,), timeout=FAREWELL_S)
            self.phase = Phase.STOPPED
            self.large_work.close()
            await asyncio.to_thread(self._control.close)

    async def _drain(self, wait_for_loads: bool) -> None:
        """One part that fails to stop keeps no other from it."""
        ends = await asyncio.gather(*(frontend.stop() for frontend in self.frontends), return_exceptions=True)
        for frontend, end in zip(self.frontends, ends, strict=True):
            if end is not None:
                log.error("frontend '%s' failed to stop", frontend.name, exc_info=end)
        await self._lifecycle.stop(wait_for_loads=wait_for_loads)

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def __enter__(self) -> Server:
        fast = importlib.util.find_spec("uvloop") is not None
        self._portal = start_blocking_portal("asyncio", {"use_uvloop": fast}, name="headrace")
        portal = self._portal.__enter__()
        try:
            portal.call(self.start)
        except BaseException:
            self._portal.__exit__(None, None, None)
            raise
        self._call = portal.call
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._portal is not None
        try:
            self._call(self.stop)
        finally:
            self._portal.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ inference

    def submit(self, request: InferRequest) -> None:
        """Resolve, check and enqueue ``request``, which is then answered by ``request.respond``.

        What frontends call, on the event loop. Raises `HeadraceError` if it is refused.
        """
        self.resolve(request.model_name, request.model_version).submit(request)

    async def infer_async(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike | BytesTensor],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout_us: int = 0,
        priority: int = 0,
    ) -> InferResponse:
        """The model's answer. Arrays go in without a copy; strings may be str or bytes.

        Awaitable on any event loop. Cancelling the await takes the request out of the queue.
        Raises `HeadraceError`.
        """
        self._require_running()
        request = InferRequest(
            model,
            {name: as_tensor(value) for name, value in inputs.items()},
            _unheard,
            outputs,
            "",
            version,
            parameters or {},
            priority,
            timeout_us,
        )
        answer = self._answer(request)
        if asyncio.get_running_loop() is self.loop:
            return await answer
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self.loop))

    def infer(self, model: str, inputs: Mapping[str, npt.ArrayLike | BytesTensor], **settings: Any) -> InferResponse:
        """`infer_async` for threads: blocks until the answer is there. Refused on the event loop."""
        self._require_running()
        if asyncio._get_running_loop() is self.loop:
            raise Unsupported("infer would block the event loop that is to answer it: await infer_async instead")
        coroutine = self.infer_async(model, inputs, **settings)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _require_running(self) -> None:
        if self.phase in (Phase.NEW, Phase.STOPPED):
            raise Unavailable("the server is not running: use it inside 'with Server(...)', or await start() first")

    async def _answer(self, request: InferRequest) -> InferResponse:
        model = self._directory.resolve_loaded(request.model_name, request.model_version)
        if model.decoupled:
            raise Unsupported(f"model '{request.model_name}' is decoupled: it may give any number of responses")
        answer = AwaitedAnswer()
        request.respond = answer
        model.submit(request)
        return await answer.to(request)

    # ------------------------------------------------------------------ what frontends show

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
        return not self.options.strict_readiness or self._lifecycle.are_settled

    @property
    def has_checks(self) -> bool:
        """Whether `check_ready` may have to ask an instance, and so to wait."""
        return self.options.strict_readiness and any(model.has_checks for model in self.served())

    async def check_ready(self) -> bool:
        """`ready`, and with strict readiness what the instances that have an ``is_ready`` say now."""
        if not self.ready or not self.options.strict_readiness:
            return self.ready
        return all(await asyncio.gather(*(model.check_ready() for model in self.served())))

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether requests to that version (empty: the latest) would be taken; False if there is none.

        Raises `InvalidArgument` for a version that is no number.
        """
        try:
            model = self.resolve(name, version)
        except (NotFound, Unavailable):
            return False
        return await model.check_ready()

    def metadata(self) -> Metadata:
        return Metadata(self.options.id, self._version, list(EXTENSIONS))

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Every model version that the server knows, sorted."""
        records = self._lifecycle.records
        return [entry for name in sorted(records) for entry in index_of(records[name], ready_only)]

    def served(self, name: str | None = None, version: str = "") -> list[ServedModel]:
        """The ready versions that a statistics request means; raises `InvalidArgument`."""
        return self._directory.all_ready() if name is None else self._directory.for_statistics(name, version)

    def statistics(self, name: str, version: str) -> list[ServedModel]:
        """`served` for callers from outside; an empty ``name`` is all. Raises `Unavailable` before `start` is over."""
        self._directory.require_open()
        return self.served(name or None, version)

    def ready_versions(self, name: str) -> list[int]:
        """The ready versions of ``name``, ascending."""
        return self._directory.ready_versions(name)

    async def list_repository(self, ready_only: bool = False) -> list[IndexEntry]:
        """`index`, and in control mode ``explicit`` the models of the repository that were never loaded.

        Raises `Unavailable` before `start` is over.
        """
        self._directory.require_open()
        return await self._control.index(ready_only)

    async def load(self, name: str, parameters: Mapping[str, str | bytes] = MappingProxyType({})) -> None:
        """Load or reload ``name`` in control mode ``explicit``; returns when it serves. On the server's loop.

        ``parameters`` may hold ``config``, JSON that takes the place of the config file, and
        ``file:<path>``, the contents of files that take the place of the model's directory
        (docs/spec/behaviours.md section 5.4). Raises `HeadraceError`; then the old versions go on.
        """
        self._require_ready()
        await self._control.load(name, parameters)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload ``name`` in control mode ``explicit``; returns once it takes no more requests.

        What it has is answered in the background. Models do not have dependents yet, so
        ``unload_dependents`` changes nothing. Raises `HeadraceError`; an unknown name is no error.
        """
        self._require_ready()
        await self._control.unload(name)

    def _require_ready(self) -> None:
        self._directory.require_open()
        if self.phase is not Phase.READY:
            raise Unavailable("Server not ready")


def _unheard(answer: Answer, final: bool) -> None:
    """Replaced before the request is submitted."""
