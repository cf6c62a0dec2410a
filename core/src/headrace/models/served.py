"""One version of a model that is loaded and takes requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.models import documents
from headrace.models.readiness import Readiness
from headrace.models.refusal import explain
from headrace.models.signature import Signature
from headrace.models.view import ModelView
from headrace.schedulers.kernel import Kernel
from headrace.telemetry.statistics import ModelStatistics, Snapshot
from headrace.workers.worker import Worker


class ServedModel:
    """Signature, scheduling kernel and workers of one version, put together at load.

    ``labels`` maps an output to the lines of its label file. ``release`` is called after the last
    instance has closed.
    """

    def __init__(
        self,
        version: int,
        config: ModelConfig,
        signature: Signature,
        scheduler: Kernel,
        workers: Sequence[Worker],
        statistics: ModelStatistics,
        labels: Mapping[str, Sequence[str]],
        release: Callable[[], None],
    ) -> None:
        self.name = config.name
        self.version = version
        self.config = config
        self.signature = signature
        self.labels = labels
        self.statistics = statistics
        self.scheduler = scheduler
        self.max_batch_size = config.max_batch_size
        self.decoupled = config.model_transaction_policy.decoupled
        self.platform = config.platform or config.backend
        self.workers = workers
        self._readiness = Readiness(workers)
        self._release = release
        #: What frontends see of it, and what requests are started by.
        self.view = ModelView(
            self.name,
            version,
            self.platform,
            self.max_batch_size,
            self.decoupled,
            config,
            signature.inputs,
            signature.outputs,
            labels,
            documents.metadata(self.platform, signature),
            signature.check,
            partial(explain, signature),
            scheduler.submit,
        )

    @property
    def inputs(self) -> Mapping[str, Spec]:
        return self.signature.inputs

    @property
    def outputs(self) -> Mapping[str, Spec]:
        return self.signature.outputs

    def wire_shape(self, spec: Spec) -> tuple[int, ...]:
        """``spec``'s dims as metadata shows them: with -1 in front when the model batches."""
        return self.signature.wire_shape(spec)

    @property
    def ready(self) -> bool:
        """Whether every instance is alive. `check_ready` asks them, too."""
        return all(worker.alive for worker in self.workers)

    @property
    def reason(self) -> str:
        """Why it is not `ready`, with the last traceback if there is one; empty if it is."""
        return next((worker.reason for worker in self.workers if not worker.alive), "")

    @property
    def has_checks(self) -> bool:
        """Whether `check_ready` may have to wait."""
        return self._readiness.has_checks

    async def check_ready(self) -> bool:
        """`ready`, and what the instances that have an ``is_ready`` of their own say now."""
        return self.ready and await self._readiness.check()

    def has_waiting(self, ticket: Ticket) -> bool:
        """Whether ``ticket`` still waits for an instance."""
        return self.scheduler.has_waiting(ticket)

    def snapshot(self) -> Snapshot:
        """The statistics, added up now."""
        return self.statistics.snapshot(self.scheduler.pending, sum(worker.restarts for worker in self.workers))

    async def drain(self) -> None:
        """Refuse new requests and wait until those submitted are answered."""
        await self.scheduler.drain()

    def close(self) -> None:
        """End the instances. Event loop only; `join` waits for them."""
        self.scheduler.close()

    def abandon(self) -> None:
        """`close`, without waiting for anybody: every request that is queued or executed is answered now,
        with `Unavailable`, so that `drain` returns, and no instance begins another. Event loop only; any
        number of times. What an instance is at goes on until it looks at ``cancelled``, or ends."""
        self.scheduler.abandon()

    def join(self) -> None:
        """Wait until every instance has closed, then release what they shared. Blocks.

        Raises what one of them raised, when all is done.
        """
        with ExitStack() as stack:
            stack.callback(self._release)
            for worker in reversed(self.workers):
                stack.callback(worker.join)
