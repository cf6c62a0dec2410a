"""The server: puts options, plugins, repository and models together.

Everything that handles a request runs on one event loop, in the thread that awaits `Server.start`; ``with Server(...)``
provides such a thread. Instances run on threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version as distribution_version
from itertools import chain
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from anyio.from_thread import BlockingPortal, start_blocking_portal

from headrace.caches.model_cache import ServerCache, make_cache
from headrace.config import support
from headrace.config.option_groups import complete_groups
from headrace.config.options import ServerOptions
from headrace.engine import Engine, Phase
from headrace.errors import ConfigError, HeadraceError, InternalError, Unavailable, Unsupported, plugin_errors
from headrace.executors.threads import LoopMailbox
from headrace.frontends.base import Frontend, streams_s
from headrace.frontends.failures import learn_paths
from headrace.messages.request import InferRequest, Parameter, as_tensors
from headrace.messages.response import InferResponse
from headrace.messages.single import AwaitedAnswer
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.models.control import Control
from headrace.models.control_mode import LoadingParts, control_mode, holding
from headrace.models.interceptors import make_interceptors
from headrace.models.lifecycle import Lifecycle
from headrace.models.loader import Loader
from headrace.models.local_services import ModelCalls, ServerServices
from headrace.models.running_loads import LoadSlots, NestedLoads
from headrace.models.served import ServedModel
from headrace.models.serving_table import ServingTable
from headrace.models.submission import RequestSubmitter, refuse_decoupled_infer
from headrace.plugins import Plugins
from headrace.schedulers.rate_limiter import RateLimiter
from headrace.storage.repositories import Repositories
from headrace.telemetry import exposition
from headrace.telemetry.custom import CustomMetrics
from headrace.telemetry.metrics import ModelCollector, labels_of, lost_lines
from headrace.telemetry.published import PublishedMetrics, Publisher, PublisherLabels
from headrace.telemetry.summaries import Summaries

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

#: After the time to stop is over: 0.5 s to send the last answers, and 0.5 s for cancelled work to end.
FAREWELL_S = 0.5


class Server:
    """Serves a model repository: ``Server("models")``, or ``Server(ServerOptions(...))``.

    In a script, ``with Server("models") as server`` and `infer`. In async code, ``async with`` and
    `infer_async`. No port is opened unless `start_frontends` is awaited, before `start` or after it.
    """

    def __init__(
        self, repository: str | PathLike[str] | ServerOptions, *, found_plugins: Any = None, **options: Any
    ) -> None:
        """Create a server. ``options`` are fields of `ServerOptions`, if ``repository`` is a path.

        ``found_plugins`` are the `Plugins` that these options allow, for this server alone. If None, they are searched.

        Raises `ConfigError` for an option without an implementation that must not be ignored, and for a required option
        of a plugin that is missing.
        """
        if not isinstance(repository, ServerOptions):
            repository = ServerOptions(model_repository=(fspath(repository),), **options)
        support.refuse(repository)
        learn_paths(repository.model_repository)
        self.plugins: Plugins = found_plugins or Plugins.discover(repository.plugins)
        support.refuse_without({part.name for part in self.plugins.extensions}, repository, ("trace_config",))
        groups = complete_groups(self.plugins.options, repository.plugin_options, self.plugins.complaints)
        self.options = replace(repository, plugin_options=groups)
        self.custom_metrics = CustomMetrics()
        self.frontends: list[Frontend] = []
        self.loop: asyncio.AbstractEventLoop
        self._table = ServingTable()
        #: The only object that frontends get.
        admission = make_interceptors(self.plugins.interceptors, self.options)
        self.engine = engine = Engine(self.options, self._table, self._measure(), admission)
        self._mode = engine.mode = control_mode(self.options, admission.interceptors if admission else ())
        engine.extension_parts = self.plugins.extensions
        engine.host = partial(self.plugins.frontends.host, self.options)
        self._single = RequestSubmitter(self._table.resolve_loaded, refuse_decoupled_infer, admission=admission)
        self._any_number = engine.submitter()
        self._lifecycle: Lifecycle
        self._control: Control
        self._cache: ServerCache | None = None
        self._limiter: RateLimiter | None = None
        self._portal: contextlib.AbstractContextManager[BlockingPortal] | None = None
        # The other operations of a program are those of the engine and the serving table.
        self.resolve, self.ready_versions = self._table.served, self._table.ready_versions
        self.load, self.unload = engine.load, engine.unload
        self.index, self.list_repository = engine.index, engine.list_repository
        self.check_ready, self.is_model_ready = engine.check_ready, engine.is_model_ready
        self.when_ready, self.metadata, self.explain = engine.when_ready, engine.metadata, engine.explain

    def served(self, name: str | None = None, version: str | int = "") -> list[ServedModel]:
        """Return the versions that take requests: all, or those of a statistics request. Raises `InvalidArgument`."""
        return self._table.all_ready() if name is None else self._table.for_statistics(name, version)

    def _measure(self) -> Callable[[], Iterable[Metric]]:
        """Return a function that reads all metrics: of the models, of parts, and of the models' own."""
        settings = exposition.parse_metrics_config(self.options.metrics_config)
        summaries = Summaries() if settings.summary_latencies else None
        if summaries is not None:
            self.plugins.register(summaries)
        shows = exposition.family_filter(self.options.metrics_config)
        models = ModelCollector(self._table.all_ready, settings, summaries, shows)
        published = PublishedMetrics(self._publishers)
        return lambda: chain(
            models.collect(),
            [each for each in (*published.collect(), *self.custom_metrics.collect(), lost_lines()) if shows(each.name)],
        )

    def _publishers(self) -> Iterable[tuple[PublisherLabels, Publisher]]:
        """Return the parts that may have metrics of their own now."""
        for model in self._table.all_ready():
            yield labels_of(model), model.model_queue.full_scheduler
        if self._cache is not None:
            yield {}, self._cache.cache
        for extension in self.engine.extensions:
            yield {}, extension
        for interceptor in () if self.engine.admission is None else self.engine.admission.interceptors:
            yield from interceptor.publishers()
        for use in self._limiter.uses() if self._limiter is not None else ():
            yield use.labels, use

    @property
    def phase(self) -> Phase:
        return self.engine.phase

    @property
    def live(self) -> bool:
        return self.engine.live

    @property
    def ready(self) -> bool:
        """True if the server is ready, without calling an ``is_ready``; `check_ready` does."""
        return self.engine.ready

    @property
    def has_left_threads(self) -> bool:
        """True if loads have abandoned threads, which may never end. Then only `os._exit` ends the process safely."""
        return self.engine.phase is not Phase.NEW and self._lifecycle.abandoned_loads.has_any

    # ------------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Load the models that the control mode loads at start.

        Raises `HeadraceError` if a model fails or there is no repository, and ``exit_on_error`` is set.
        """
        await self._begin()
        try:
            await self._load_first()
            if self.phase is Phase.STARTING:
                self._serve()
        except BaseException:
            await self.stop()
            raise
        if not self.engine.exiting:
            self.engine.notify_ready()

    async def choose_frontends(self) -> list[type[Frontend]]:
        """Return the frontends that the options choose.

        Raises `ConfigError` for an option that needs an extension or a frontend that is not there, and what
        `FrontendRegistry.chosen` raises.
        """
        chosen = self.plugins.frontends.chosen(self.options)
        await self._begin()
        announced = {name for each in self.engine.extensions for name in each.announces}
        support.refuse_without(announced | {part.name for part in chosen}, self.options)
        return chosen

    async def start_frontends(self) -> None:
        """Listen for every enabled protocol that does not listen yet.

        May be called before `start` or after it. Until the models are loaded, health, metadata and metrics are
        answered, and requests for models are refused. A frontend that `Frontend.shares_port` starts only in a call
        after `start`. Raises `Unavailable` with a port that is in use, and what `choose_frontends` raises.
        """
        parts = [part for part in await self.choose_frontends() if part not in map(type, self.frontends)]
        for frontend in [part(self.engine) for part in parts]:
            if frontend.enabled and self.options.workers and not frontend.shares_port:
                raise ConfigError(
                    f"--workers={self.options.workers} is refused with the frontend '{frontend.name}': it does not "
                    "share its port, so that one worker only could have it"
                )
            if frontend.enabled and not (frontend.shares_port and self.engine.is_loading):
                with plugin_errors(f"frontend '{frontend.name}' cannot start"):
                    await frontend.start()
                self.frontends.append(frontend)

    async def _begin(self) -> None:
        """Create the objects that load and answer, once."""
        if self.phase is not Phase.NEW:
            return
        self.loop = asyncio.get_running_loop()
        if self.options.cache_config:
            cache = await asyncio.to_thread(make_cache, self.options.cache_config, self.plugins.caches)
            self._cache = ServerCache(cache, self.engine.off_loop_work, self.loop)
        self.engine.phase = Phase.STARTING
        options, plugins, table = self.options, self.plugins, self._table
        for complaint in plugins.complaints:
            log.warning("%s", complaint)
        with contextlib.suppress(HeadraceError):  # what `choose_frontends` raises; others do without extensions
            for extension in self.engine.extensions:
                plugins.register(extension)
        slots = LoadSlots(options.model_load_thread_count)
        is_limited = options.rate_limit == "execution_count"
        limiter = self._limiter = RateLimiter(self.loop, options.rate_limit_resource) if is_limited else None
        calls = ModelCalls(self.loop, table, self.engine.admission, limiter)
        nested = NestedLoads(slots)
        services = ServerServices(LoopMailbox(self.loop), calls, self.engine, nested, self.custom_metrics)
        loader = Loader(options, plugins, self.loop, services.siblings, self._cache, limiter)
        repositories = Repositories(options, plugins.storages)
        lifecycle = Lifecycle(loader, table, slots, nested, repositories.find, options.model_load_retry_count)
        self._lifecycle = self.engine.lifecycle = lifecycle
        self._control = self.engine.control = Control(options, self._lifecycle, repositories, self._mode)
        if self._mode is not None:
            self._mode.parts = LoadingParts(lifecycle, loader, repositories, slots)
            table.changed, lifecycle.is_on_demand = self._mode.changed, True
            calls.hold, calls.is_loadable = self._mode.hold, self._mode.is_ready
        self.engine.version = await asyncio.to_thread(distribution_version, "headrace")  # reads files

    def _serve(self) -> None:
        """Answer requests for models from now on."""
        self._table.open()
        self.plugins.hook.server_started(server=self)
        self.engine.phase = Phase.READY

    async def _load_first(self) -> None:
        """Load the models of the start. Without a repository, the server has failed."""
        exit_on_error = self.options.exit_on_error
        try:
            failures = await self._control.start()
        except HeadraceError as error:
            if exit_on_error:
                raise
            log.error("%s", error.message)
            self.engine.phase, self._table.refusal = Phase.FAILED, "Server not ready"
            self._control.retry(self._serve)
            return
        if failures and exit_on_error:
            raise InternalError("failed to load all models") from failures[0]

    async def stop(self, *, wait_for_loads: bool = True) -> None:
        """Answer the requests in flight, close the frontends, unload everything.

        Takes at most ``exit_timeout_secs``, then raises `Unavailable`. Every model has then been ended at once: its
        requests are answered with `Unavailable`, and nothing starts any more. Without ``wait_for_loads``, loading
        models are abandoned; they end with the process.
        """
        if self.phase in (Phase.NEW, Phase.EXITING, Phase.STOPPED):
            return
        self.engine.phase = Phase.EXITING
        self._control.stop()
        self._lifecycle.stopping()
        self.plugins.notify("server_stopping", server=self)
        draining = asyncio.ensure_future(self._drain(wait_for_loads))
        ending = self.loop.call_later(streams_s(self.options.exit_timeout_secs), self.engine.streams.end_all)
        try:
            done, _ = await asyncio.wait((draining,), timeout=self.options.exit_timeout_secs)
            if not done:
                self._lifecycle.close()
                await asyncio.wait((draining,), timeout=FAREWELL_S)
                raise Unavailable("Exit timeout expired. Exiting immediately.")
            draining.result()
        finally:
            ending.cancel()
            if not draining.done():
                draining.cancel()
                await asyncio.wait((draining,), timeout=FAREWELL_S)
            self.engine.phase = Phase.STOPPED
            self.engine.off_loop_work.close()
            await asyncio.to_thread(self._control.close)
            if self._cache is not None:
                await asyncio.to_thread(self._cache.close)

    async def _drain(self, wait_for_loads: bool) -> None:
        """Stop the frontends, then unload the models. A frontend that fails to stop does not block the others."""
        ends = await asyncio.gather(*(frontend.stop() for frontend in self.frontends), return_exceptions=True)
        for frontend, end in zip(self.frontends, ends, strict=True):
            if end is not None:
                log.error("frontend '%s' failed to stop", frontend.name, exc_info=end)
        log.info("Waiting for in-flight requests to complete.")
        await self._lifecycle.stop(wait_for_loads=wait_for_loads)
        self.engine.close_extensions()

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

    def submit(self, ticket: Ticket) -> None:
        """Submit a request. ``ticket.respond`` gets the answers: any number, if its model is decoupled. Event loop
        only.

        Raises `HeadraceError` if it is refused; it is then not answered.
        """
        self._any_number.submit(ticket)

    async def infer_async(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike | BytesTensor],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout_us: int = 0,
        priority: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> InferResponse:
        """Return the response of the model's latest version, or of ``version``. Awaitable on any event loop.

        Arrays are not copied; strings may be str or bytes. Cancelling the await cancels the request. Raises
        `HeadraceError`.
        """
        self._require_running()
        request = InferRequest(
            model,
            as_tensors(inputs),
            outputs,
            "",
            str(version),
            parameters or {},
            priority,
            timeout_us,
            sequence_id,
            sequence_start,
            sequence_end,
        )
        answer = self._answer(request)
        if asyncio.get_running_loop() is self.loop:
            return await answer
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self.loop))

    def infer(self, model: str, inputs: Mapping[str, npt.ArrayLike | BytesTensor], **settings: Any) -> InferResponse:
        """Do as `infer_async` for threads: block until the response arrives. Refused on the event loop."""
        self._require_running()
        if asyncio._get_running_loop() is self.loop:
            raise Unsupported("infer would block the event loop that is to answer it: await infer_async instead")
        coroutine = self.infer_async(model, inputs, **settings)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _require_running(self) -> None:
        if self.phase in (Phase.NEW, Phase.STOPPED):
            raise Unavailable("the server is not running: use it inside 'with Server(...)', or await start() first")

    async def _answer(self, request: InferRequest) -> InferResponse:
        answer = AwaitedAnswer()
        ticket = Ticket(request, answer)
        async with holding(self._mode, request.model_name):
            self._single.submit(ticket)
        return await answer.to(ticket)
