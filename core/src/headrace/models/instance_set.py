"""The instances of one version, and how they are replaced while it serves.

An instance stays if the new config has one like it: same device, and same group settings except name and count. New
instances are loaded beside the old ones. They start to serve in the same turn of the event loop in which the others
stop. A removed instance finishes its last batch, answers its requests, and is closed. Source: docs/spec/behaviours.md
sections 4.5 and 5.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.devices import Placement, ResourceDemand, plan_instances
from headrace.executors.executor import Executor
from headrace.executors.threads import run_on_thread
from headrace.models.executor_factory import ExecutorFactory
from headrace.schedulers.instance_info import instance_info
from headrace.schedulers.instance_source import InstanceSource
from headrace.schedulers.model_queue import ModelQueue
from headrace.schedulers.rate_limiter import RateLimiter
from headrace.telemetry.executions import Observer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One instance: its placement, its executor, and the source of its batches."""

    placement: Placement
    executor: Executor
    source: InstanceSource

    def serve(self, loop: asyncio.AbstractEventLoop, observers: Sequence[Observer]) -> None:
        """Let the instance take batches."""
        self.source.executor = self.executor
        self.executor.serve(self.source, loop, observers)


class InstanceSet:
    """The instances that serve, and those that are being removed.

    ``demands`` are their resources for ``limiter``, if there is one.
    """

    def __init__(
        self,
        model_queue: ModelQueue,
        factory: ExecutorFactory,
        limiter: RateLimiter | None,
        demands: list[ResourceDemand],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        #: In the order of the config's groups. Replaced, never changed.
        self.executors: tuple[Executor, ...] = ()
        self._model_queue, self._factory, self._limiter = model_queue, factory, limiter
        self._demands, self._loop = demands, loop
        self._members: Sequence[Member] = ()
        #: A list of its own: the executors see its changes.
        self._observers: list[Observer] = []
        self._removed: dict[Member, Future[None]] = {}
        self._past_restarts = 0

    def begin(self, placements: Sequence[Placement], executors: Sequence[Executor]) -> None:
        """Add the first ``executors``, which are loaded. They do not serve yet."""
        self._settle(
            Member(placement, executor, source)
            for placement, executor, source in zip(placements, executors, self._model_queue.sources, strict=True)
        )

    def serve(self, observers: Sequence[Observer]) -> None:
        self._observers += observers
        for member in self._members:
            member.serve(self._loop, self._observers)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Report executions to ``observer`` too, until the returned function is called. Any thread. One that observes
        several times gets each execution once."""
        self._observers.append(observer)
        return partial(self._observers.remove, observer)

    @property
    def restarts(self) -> int:
        """The number of restarts of all instances, including removed ones."""
        removed = (member.executor for member in tuple(self._removed))
        return self._past_restarts + sum(executor.restarts for executor in (*self.executors, *removed))

    def join(self) -> None:
        """Wait until all have closed. Blocks. Raises what one of them raised, after all have closed."""
        with ExitStack() as stack:
            for done in tuple(self._removed.values()):
                stack.callback(done.result)
            for executor in reversed(self.executors):
                stack.callback(executor.join)

    def prepare(self, config: ModelConfig) -> InstanceChange:
        """Load the new instances of ``config``. Blocks. Raises `HeadraceError`; nothing has changed then.

        One change at a time: end it by `InstanceChange.commit` or `InstanceChange.discard`.
        """
        wanted = plan_instances(config)
        kept = _alike([member.placement for member in self._members], wanted)
        coming = _named(wanted, kept, self._members)
        with ExitStack() as undo:
            if self._limiter is not None:
                demands = [placement.demand for placement in coming]
                self._limiter.add(demands)
                undo.callback(self._limiter.remove, demands)
            executors = self._factory.load(coming, config)
            undo.pop_all()
        members = [None if index is None else self._members[index] for index in kept]
        return InstanceChange(self, config, members, list(zip(coming, executors, strict=True)))

    def replace_instances(
        self, config: ModelConfig, kept: Sequence[Member | None], added: Sequence[tuple[Placement, Executor]]
    ) -> list[Future[None]]:
        """Replace instances: put the ``added`` executors into the free slots of ``kept``, and close every instance that
        is not in ``kept``.

        Each returned future is done when one instance has closed. Event loop only.
        """
        removed = [member for member in self._members if member not in kept]
        infos = [instance_info(placement, config) for placement, _ in added]
        sources = self._model_queue.replace_instances(infos, [member.source for member in removed])
        new = iter([Member(*pair, source) for pair, source in zip(added, sources, strict=True)])
        self._demands += [placement.demand for placement, _ in added]
        before = self._members
        self._settle(member or next(new) for member in kept)
        for member in self._members:
            if member not in before:
                member.serve(self._loop, self._observers)
        return [self._begin_removal(member) for member in removed]

    def drop(self, added: Sequence[tuple[Placement, Executor]]) -> None:
        """Close executors that never served. Blocks."""
        for _, executor in added:
            try:
                self._close(executor)
            except Exception:  # the others must still be closed
                log.exception("instance '%s' failed to close", executor.name)
        if self._limiter is not None:
            self._limiter.remove([placement.demand for placement, _ in added])

    def _settle(self, members: Iterable[Member]) -> None:
        self._members = tuple(members)
        self.executors = tuple(member.executor for member in self._members)

    def _begin_removal(self, member: Member) -> Future[None]:
        done = self._removed[member] = Future()
        task = self._loop.create_task(self._remove(member))
        task.add_done_callback(lambda _: done.set_result(None))
        return done

    async def _remove(self, member: Member) -> None:
        try:
            await self._model_queue.dismiss(member.source)
            await self._model_queue.wait_until_answered(member.executor.unanswered)
            member.source.end()
            await run_on_thread(partial(self._end, member), f"headrace-close-{member.executor.name}")
        except Exception:
            log.exception("instance '%s' failed to close", member.executor.name)
        finally:
            self._past_restarts += member.executor.restarts
            del self._removed[member]
            self._model_queue.ask_again()  # requests may have been assigned to it that it did not take

    def _end(self, member: Member) -> None:
        try:
            self._close(member.executor)
        finally:
            if self._limiter is not None:
                self._limiter.remove([member.placement.demand])
                self._demands.remove(member.placement.demand)

    def _close(self, executor: Executor) -> None:
        try:
            executor.join()
        finally:
            self._factory.forget(executor)


class InstanceChange:
    """The new instances of ``config``, loaded beside the ones that serve.

    ``kept`` has a slot per instance of ``config``: the instance that stays, or None for the next of ``added``.
    """

    def __init__(
        self,
        instances: InstanceSet,
        config: ModelConfig,
        kept: Sequence[Member | None],
        added: Sequence[tuple[Placement, Executor]],
    ) -> None:
        self.config = config
        self._instances, self._kept, self._added = instances, kept, added

    def commit(self) -> list[Future[None]]:
        """Serve with the new instances. Each future is done when one old instance has closed. Event loop only."""
        return self._instances.replace_instances(self.config, self._kept, self._added)

    def discard(self) -> None:
        """Close the new instances, which never served. Blocks."""
        self._instances.drop(self._added)


def _alike(present: Sequence[Placement], wanted: Sequence[Placement]) -> list[int | None]:
    """Return, for each of ``wanted``, the index in ``present`` of the instance that is like it, preferably by name."""
    left = dict(enumerate(present))
    indices: list[int | None] = [None] * len(wanted)
    for key in (attrgetter("signature", "name"), attrgetter("signature")):
        for number, placement in enumerate(wanted):
            if indices[number] is not None:
                continue
            for index, other in left.items():
                if key(other) == key(placement):
                    indices[number] = index
                    del left[index]
                    break
    return indices


def _named(placements: Sequence[Placement], kept: Sequence[int | None], members: Sequence[Member]) -> list[Placement]:
    """Return the new placements, renamed so that no name collides with an instance that stays."""
    used = {members[index].placement.name for index in kept if index is not None}
    free = [placement.name for placement in placements if placement.name not in used]
    new = [placement for placement, index in zip(placements, kept, strict=True) if index is None]
    own = {placement.name for placement in new if placement.name not in used}
    others = iter([name for name in free if name not in own])
    return [
        placement if placement.name in own else replace(placement, name=next(others, placement.name))
        for placement in new
    ]
