"""The executor of an instance in a process of its own. Batches are sent and answers received on the event loop.

A child that dies is replaced: at once the first time, then after growing delays, and after a pause if it dies too
often. Its requests in flight are answered with `Unavailable`: the same request may succeed when it is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from time import monotonic_ns

from headrace.backends.base import Isolation
from headrace.errors import Cancelled, HeadraceError, Unavailable, summary
from headrace.executors.executor import BatchSource, RunsOn
from headrace.executors.instance import ExecutionRecorder
from headrace.executors.kind import ExecutorResources, InstancePlan
from headrace.executors.threads import LoopWakeup
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.executions import BatchTimes, Observer
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_processes.batch_channel import WarmUp
from headrace_processes.child import Child
from headrace_processes.handshake import InstanceSpec
from headrace_processes.ipc.replies import Times
from headrace_processes.remote_services import ServiceEndpoint
from headrace_processes.supervision import exits
from headrace_processes.supervision.exits import RestartPolicy

log = rate_limited_logger(__name__)

#: If the scheduler raises an exception, the instance polls it again after 1 s.
_RETRY_S = 1.0


class ProcessExecutor:
    """Owns the child processes of one instance, one after the other. A `headrace.executors.executor.Executor`.

    ``siblings`` are the executors of all instances of the version; this one is added when it is created. While all of
    them pause, requests are refused instead of queued. `load`, `serve`, `join` and `check_ready` are called on threads,
    everything else on the event loop.
    """

    def __init__(
        self,
        plan: InstancePlan,
        spec: InstanceSpec,
        isolation: Isolation,
        siblings: Sequence[ProcessExecutor],
        resources: ExecutorResources,
    ) -> None:
        self.name, self.model = spec.instance_name, spec.name
        self.runs_on: RunsOn = "process"
        self.restarts = 0
        self.reason = ""
        self.executing: Sequence[Ticket] = ()
        self._spec, self._isolation, self._siblings = spec, isolation, siblings
        self._services, self._schema, self._samples = plan.services, plan.version.schema, plan.version.samples
        self._loop, self._exit_timeout_s = resources.loop, resources.exit_timeout_s
        self._recorder = ExecutionRecorder(self.name, plan.statistics)
        self._is_decoupled = spec.is_decoupled
        self._source: BatchSource | None = None
        self._wakeup = LoopWakeup(self._pull)
        self._child: Child | None = None
        self._newest: Child | None = None
        self._restart_policy = RestartPolicy(isolation.restart_pause_s)
        self._restart: asyncio.Task[None] | None = None
        #: While restarts pause after too many exits: the beginning of `reason`. Else empty.
        self._pause_text = ""
        self._is_stopping = False
        #: The UUIDs of the server's GPUs, for an instance on a GPU.
        self._gpus: Sequence[str] = ()
        #: As `headrace.BaseInstance.takes_device_tensors` and ``inputs_on_host``. Set when it is loaded.
        self.takes_device_tensors = self.inputs_on_host = False

    # ------------------------------------------------------------------ threads

    def load(self) -> None:
        """Start the first child. Raises what loading raised there, or `LoadError`."""
        if self._spec.device_kind == "gpu":
            from headrace_processes.device_child import visible_gpus

            self._gpus = visible_gpus()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()

    def serve(self, source: BatchSource, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer] = ()) -> None:
        """Start to take batches from ``source``. Each batch is reported to ``observers``."""
        self._source, self._recorder.observers = source, observers
        loop.call_soon_threadsafe(self._pull)

    def join(self) -> None:
        """Close the instance, and wait for the end of its process."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    def check_ready(self) -> bool:
        """Return the result of the instance's ``is_ready``. Raises `Unavailable` with its reason if it gives one."""
        return asyncio.run_coroutine_threadsafe(self._check(), self._loop).result()

    def memory_bytes(self) -> int:
        """Return the memory of the child and of its arenas, in bytes; 0 if there is no child."""
        child = self._child
        return 0 if child is None else child.memory_bytes()

    # ------------------------------------------------------------------ event loop

    @property
    def alive(self) -> bool:
        return self._child is not None

    @property
    def unanswered(self) -> Sequence[Ticket]:
        return () if self._child is None else tuple(self._child.batches.in_flight.values())

    @property
    def has_check(self) -> bool:
        return self._child is not None and self._child.has_check

    async def _check(self) -> bool:
        return self._child is not None and await self._child.check()

    async def _begin(self) -> None:
        """Start a child and warm it up."""
        warm_up = WarmUp()
        child = self._new_child(warm_up)
        self._newest = child
        await child.start()
        if self._gpus:
            self._take_device_tensors(child)
        try:
            for sample in self._samples:
                await warm_up.run(child.batches, sample, self.name)
            warm_up.require_alive()
        except BaseException as error:
            try:
                if isinstance(error, Exception):  # not if the load was cancelled
                    await child.stop(self._exit_timeout_s())  # the instance releases its resources
            finally:
                await child.kill("failed to warm up")
            raise
        child.hand_over(self)
        self._child = child

    def _new_child(self, owner: WarmUp) -> Child:
        if not self._gpus:
            return Child(self._spec, self._isolation, ServiceEndpoint(self._services, self._spec.name), owner)
        from headrace_processes.device_child import DeviceChild, DeviceEndpoint

        return DeviceChild(
            self._gpus, self._spec, self._isolation, DeviceEndpoint(self._services, self._spec.name), owner
        )

    def _take_device_tensors(self, child: Child) -> None:
        from headrace_processes.device_child import DeviceChild, DeviceOutputSchema

        assert isinstance(child, DeviceChild)
        self.takes_device_tensors, self.inputs_on_host = child.takes_device_tensors, child.inputs_on_host
        if self.takes_device_tensors and not isinstance(self._schema, DeviceOutputSchema):
            self._schema = DeviceOutputSchema.of(self._schema)

    async def _end(self) -> None:
        self._is_stopping = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait((self._restart,))
        if self._child is not None:
            await self._child.stop(self._exit_timeout_s())
            self._child = None

    def stop_loading(self) -> None:
        """Make `load` fail soon, if the first child is still loading."""
        if self._source is None and self._newest is not None:
            self._newest.stop_loading()

    def abandon(self) -> None:
        """Kill the process at once: the event loop is about to end."""
        self._is_stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if self._newest is not None:
            self._newest.abandon()

    def _pull(self) -> None:
        """Run the next batch, if the child is free and there is one."""
        source, child = self._source, self._child
        if source is None or self.executing:
            return
        if child is None or child.has_hung_up:
            self._refuse_or_wait(source)
        elif batch := self._poll(source):
            self._run(child, source, batch)

    def _poll(self, source: BatchSource) -> list[Ticket] | None:
        try:
            return source.poll(self._wakeup)
        except Exception:
            log.exception("the scheduler of instance '%s' raised an exception in next()", self.name)
            self._loop.call_later(_RETRY_S, self._pull)
            return None

    def _run(self, child: Child, source: BatchSource, batch: list[Ticket]) -> None:
        if any(ticket.cancelled and not ticket.pinned for ticket in batch):
            cancelled = [ticket for ticket in batch if ticket.cancelled]
            batch = [ticket for ticket in batch if not ticket.cancelled]
            errors = [Cancelled(f"{ticket.request.log_id}request was cancelled") for ticket in cancelled]
            self._recorder.batch(cancelled, cancelled, errors, BatchTimes(*[monotonic_ns()] * 4))
            source.deliver(cancelled, errors)
        try:
            if batch:
                child.batches.run(batch)
            self.executing = batch
            if self._is_decoupled:
                now_ns = monotonic_ns()
                for ticket in batch:
                    ticket.started_ns = now_ns
        except HeadraceError as error:
            source.deliver(batch, [error] * len(batch))
        if not self.executing:
            self._loop.call_soon(self._pull)

    def batch_done(self, tickets: Sequence[Ticket], answers: Sequence[Answer], times: Times) -> None:
        assert self._source is not None
        batch, self.executing = self.executing, ()
        # Pull after the loop has polled its sockets once more: all requests that have arrived then form one batch.
        # Earlier it would be two or three requests, and a message costs as much as six requests.
        self._loop.call_soon(self._loop.call_soon, self._pull)
        sign = self._schema.signed
        signed = [sign(ticket.request, answer) for ticket, answer in zip(tickets, answers, strict=True)]
        batch_times = BatchTimes(*times)
        for ticket in batch if len(tickets) < len(batch) else ():
            ticket.started_ns = batch_times.start_ns
        self._recorder.batch(batch, tickets, signed, batch_times)
        self._source.executed(batch_times.end_ns - batch_times.start_ns)
        self._source.deliver(tickets, signed)

    def answered(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        assert self._source is not None
        answer = self._schema.signed(ticket.request, answer)  # the output of a child is not trusted
        if final:
            ticket.started_ns = ticket.started_ns or monotonic_ns()
            self._recorder.late(ticket, answer)
            self._source.deliver((ticket,), (answer,))
        elif answer is not None:
            self._source.progress(ticket, answer)

    # ------------------------------------------------------------------ exit and restart

    def child_died(self, child: Child, reason: str) -> None:
        log.error("%s", reason)
        self._child, self.reason = None, reason
        lost, self.executing = list(child.batches.in_flight.values()), ()
        if self._source is not None:
            self._recorder.batch(lost, lost, [self._unhealthy_error()] * len(lost), BatchTimes(*[monotonic_ns()] * 4))
            self._source.deliver(lost, [self._unhealthy_error()] * len(lost))
            self._source.stop_polling(self._wakeup)
        if not self._is_stopping:
            self._restart = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        """Start another child, after a delay; if too many have exited, after a pause."""
        policy = self._restart_policy
        while self._child is None and not self._is_stopping:
            policy.add_exit()
            await asyncio.sleep(self._pause() if policy.is_exhausted else policy.delay_s)
            self.restarts += 1
            try:
                await self._begin()
            except Exception as error:
                self.reason = f"{self._pause_text}{summary(error)}"
                log.error("instance '%s' could not be restarted: %s", self.name, self.reason)
        if self._child is not None:
            self._pause_text = ""
            log.warning("instance '%s' has been restarted", self.name)
            self._pull()

    def _pause(self) -> float:
        """Start a pause and return its seconds. If all instances pause, requests are refused from now on."""
        pause_s = self._restart_policy.next_pause_s()
        reason = self.reason.removeprefix(self._pause_text)
        ends = datetime.now(timezone.utc) + timedelta(seconds=pause_s)
        self._pause_text = (
            f"died {exits.MAX_EXITS} times within {exits.WINDOW_S:g} s; it starts again at {ends:%Y-%m-%d %H:%M:%S} "
            f"UTC, after a pause of {pause_s:g} s, or when the model is loaded. "
        )
        self.reason = f"{self._pause_text}{reason}"
        log.error("instance '%s' %s", self.name, self.reason)
        for executor in self._siblings:
            if executor._pause_text:
                executor._pull()
        return pause_s

    def _refuse_or_wait(self, source: BatchSource) -> None:
        """While all instances pause, refuse the requests. Otherwise leave them to another instance or the next
        child."""
        if not all(executor._pause_text for executor in self._siblings):
            source.stop_polling(self._wakeup)
            return
        while batch := source.poll(self._wakeup):
            source.deliver(batch, [self._unhealthy_error()] * len(batch))

    def _unhealthy_error(self) -> Unavailable:
        first_line = self.reason.partition("\n")[0]
        return Unavailable(f"Stub process '{self.name}' is not healthy. {first_line[:1].upper()}{first_line[1:]}")
