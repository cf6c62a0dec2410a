"""One version of a model that is loaded and takes requests, from load to its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from headrace.backends.base import Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.executor import Executor
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.models.readiness import Readiness
from headrace.models.signature import Signature, explain
from headrace.models.view import ModelView, metadata_document
from headrace.schedulers.caching_queue import CachingModelQueue
from headrace.schedulers.dynamic import DirectScheduler
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.executions import Observer, SpanKeeper
from headrace.telemetry.statistics import ModelStatistics, Snapshot


class PreparedChange(Protocol):
    """The new instances of ``config``, loaded and not serving yet. Either method ends the change."""

    config: ModelConfig

    def commit(self) -> Sequence[Future[None]]:
        """Serve with the new instances and close those that are not in ``config``.

        Each future is done when one of these has closed. Event loop only.
        """

    def discard(self) -> None:
        """Close the new instances. Blocks."""


class Instances(Protocol):
    """The instances of one version: a `headrace.models.instance_set.InstanceSet`."""

    @property
    def executors(self) -> Sequence[Executor]:
        """In the order of the config's groups. Replaced, never changed."""

    @property
    def restarts(self) -> int:
        """The number of restarts of all instances."""

    def prepare(self, config: ModelConfig) -> PreparedChange:
        """Load the new instances of ``config``. Blocks. Raises `HeadraceError`; nothing has changed then."""

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Report executions to ``observer`` too, until the returned function is called. Any thread."""

    def join(self) -> None:
        """Wait until all have closed. Blocks."""


class ServedModel:
    """Signature, model queue and instances of one version, put together at load.

    ``labels`` maps an output to the lines of its label file. ``release`` is called after the last instance has closed.
    ``others`` are the versions that it calls, kept for it (`keep`) until it has answered its last request.
    """

    def __init__(
        self,
        model: Model,
        signature: Signature,
        model_queue: ModelQueue,
        instances: Instances,
        statistics: ModelStatistics,
        labels: Mapping[str, Sequence[str]],
        release: Callable[[], None],
        others: Collection[ServedModel] = (),
    ) -> None:
        config = model.config
        self.model = model
        self.name = config.name
        self.version = model.version
        self.config = config
        self.signature = signature
        self.labels = labels
        self.statistics = statistics
        self.model_queue = model_queue
        self.max_batch_size = config.max_batch_size
        self.decoupled = config.model_transaction_policy.decoupled
        self.platform = config.platform or config.backend
        self.instances = instances
        self._readiness = Readiness(instances.executors)
        self._release = release
        self.others = others
        #: Its memory in bytes, if a control mode counts it. That mode sets it.
        self.memory_bytes = 0
        #: The number of versions that call this one, or are being loaded to do so.
        self._users = 0
        #: True once its tickets record compute times. That costs nothing for a model that no other model calls.
        self._keeps_spans = False
        self._unused = asyncio.Event()
        #: Its view for frontends, with the functions that start requests.
        self.view = ModelView(
            self.name,
            model.version,
            self.platform,
            self.max_batch_size,
            self.decoupled,
            config,
            signature.inputs,
            signature.outputs,
            labels,
            metadata_document(self.platform, signature),
            model_queue,
            signature.check,
            partial(explain, signature),
            model_queue.submit,
            instances.observe,
            self.capacity,
            self.takes_device_tensors,
        )

    @property
    def inputs(self) -> Mapping[str, Spec]:
        return self.signature.inputs

    @property
    def outputs(self) -> Mapping[str, Spec]:
        return self.signature.outputs

    def wire_shape(self, spec: Spec) -> tuple[int, ...]:
        """Return ``spec``'s dims as in the metadata: with -1 in front if the model batches."""
        return self.signature.wire_shape(spec)

    @property
    def executors(self) -> Sequence[Executor]:
        """The executors of its instances."""
        return self.instances.executors

    @property
    def takes_device_tensors(self) -> Collection[str] | None:
        """`ModelView.takes_device_tensors`. None if an instance, a cache or the scheduler reads arrays."""
        queue, executors = self.model_queue, self.executors
        if queue.scheduler.is_stateful or isinstance(queue, CachingModelQueue):
            return None
        if not executors:
            return getattr(queue.scheduler, "takes_device_tensors", None)
        if not all(getattr(each, "takes_device_tensors", False) for each in executors):
            return None
        return () if any(getattr(each, "inputs_on_host", False) for each in executors) else self.inputs

    @property
    def ready(self) -> bool:
        """True if every instance is alive. `check_ready` also calls their ``is_ready``."""
        return all(executor.alive for executor in self.executors)

    @property
    def reason(self) -> str:
        """The reason why it is not `ready`, with the last traceback if there is one. Empty if it is."""
        return next((executor.reason for executor in self.executors if not executor.alive), "")

    @property
    def why_not_alive(self) -> str:
        """Return the first line of `reason`."""
        return self.reason.partition("\n")[0]

    @property
    def has_checks(self) -> bool:
        """True if `check_ready` may have to wait."""
        return self._readiness.has_checks

    async def check_ready(self) -> bool:
        """True if it is `ready`, and each instance with an ``is_ready`` of its own is ready now."""
        return self.ready and await self._readiness.check()

    def has_waiting(self, ticket: Ticket) -> bool:
        """True if ``ticket`` still waits for an instance."""
        return self.model_queue.has_waiting(ticket)

    def snapshot(self) -> Snapshot:
        """Return the statistics, added up now."""
        on_loop = sum(executor.runs_on == "event_loop" for executor in self.executors)
        return self.statistics.snapshot(self.model_queue.pending, self.instances.restarts, on_loop)

    def explain(self) -> dict[str, Any]:
        """Return the response of ``GET .../explain``: why the last batches ran, and what waits now. Any thread."""
        model_queue, batching = self.model_queue, self.config.dynamic_batching
        uses = () if model_queue.limiter is None else model_queue.limiter.uses(tuple(model_queue.instances))
        return {
            "name": self.name,
            "version": str(self.version),
            "scheduler": model_queue.scheduler.name,
            "instances": len(self.executors),
            "runs_on": {executor.name: executor.runs_on for executor in self.executors},
            "max_batch_size": self.max_batch_size,
            "preferred_batch_size": list(batching.preferred_batch_size),
            "max_queue_delay_us": batching.max_queue_delay_microseconds,
            "waiting": model_queue.pending,
            "in_flight": model_queue.in_flight,
            "memory_bytes": self.memory_bytes,
            "resources": [use.document() for use in uses],
            **model_queue.history.document(model_queue.clock.now_ns()),
        }

    def capacity(self) -> int:
        """Return how many requests fill the batches of all instances: `ModelView.capacity`. Event loop only."""
        scheduler = self.model_queue.scheduler
        answers_later = any(len(executor.unanswered) > len(executor.executing) for executor in self.executors)
        if self.decoupled or scheduler.is_stateful or answers_later:
            return 0
        rows = 1 if isinstance(scheduler, DirectScheduler) else max(1, self.max_batch_size)
        return self.model_queue.at_once * rows

    @property
    def can_replace_instances(self) -> bool:
        """True if it can go on while its instances are replaced."""
        return bool(self.executors) and self.model_queue.can_replace_instances

    def replace_instances(self, change: PreparedChange) -> Sequence[Future[None]]:
        """Serve with other instances. Each future is done when one old instance has closed. Event loop only.

        ``view`` is replaced, too.
        """
        left = change.commit()
        self.config = change.config
        self.view = replace(self.view, config=change.config, takes_device_tensors=self.takes_device_tensors)
        self._readiness = Readiness(self.executors)
        return left

    def keep(self) -> None:
        """Keep this version serving for one more version that calls it, until `release`. Event loop only."""
        if not self._keeps_spans:
            self._keeps_spans = True
            self.instances.observe(SpanKeeper())
        self._users += 1

    def release(self) -> None:
        """Note that one version no longer calls this one. Event loop only."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def drain(self) -> None:
        """Wait until no other version calls this one. Then refuse new requests, and wait for the answers of the others.

        Afterwards, release the versions that this one calls.
        """
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        try:
            await self.model_queue.drain()
        finally:
            for other in self.others:
                other.release()
            self.others = ()

    def close(self) -> None:
        """End the instances. `join` waits for them. Event loop only."""
        self.model_queue.close()

    def abandon(self) -> None:
        """`close`, and answer every request that is queued or executed with `Unavailable` now.

        So `drain` returns, and no instance starts another batch. Running executions go on until they read
        ``cancelled``, or end. May be called repeatedly. Event loop only.
        """
        self.model_queue.abandon()

    def join(self) -> None:
        """Wait until every instance has closed, then release their shared objects. Blocks.

        Raises what one of them raised, after all have closed.
        """
        with ExitStack() as stack:
            stack.callback(self._release)
            stack.callback(self.instances.join)
