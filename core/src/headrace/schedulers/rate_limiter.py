"""Which instances run at once where models share what there is not enough of: ``--rate-limit=execution_count``.

An instance takes the units of each resource that its group names before it runs, and gives them back when its execution
has returned. Of those that wait for the same, the one with the fewest executions goes first, its priority times its
executions being what counts: with priorities 1 and 2 one runs twice as often as the other. Nobody who needs much is
passed by those who need little, and nobody waits longer than its share for those who came late and have fewer
executions. Source: docs/spec/behaviours.md section 6.7.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import RateLimitResource
from headrace.executors.devices import Claim, Placement, Resource
from headrace.executors.executor import Executor
from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo
from headrace.schedulers.dispatcher import Dispatcher
from headrace.schedulers.instance_source import InstanceSource
from headrace.schedulers.resource_limits import limits_for, shown
from headrace.schedulers.resource_use import ResourceUse
from headrace.telemetry.batch_history import IDLE_INSTANCE, RESOURCES, Closed
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LimitedInstance(InstanceInfo):
    """An instance that takes what ``claim`` says while it executes. A scheduler sees an `InstanceInfo`."""

    claim: Claim = field(default_factory=Claim)


def instance_info(placement: Placement, config: ModelConfig) -> InstanceInfo:
    """What is told of the instance at ``placement`` of the model that ``config`` describes."""
    slots = max(1, config.max_batch_size)
    if placement.claim.units:
        return LimitedInstance(placement.name, placement.device, slots, placement.claim)
    return InstanceInfo(placement.name, placement.device, slots)


class LimitedSource(InstanceSource):
    """Where an instance gets its batches from that takes resources to run them.

    Asked for on the event loop only. Whoever asks has returned from its last execution, and gives back what it took
    for it.
    """

    __slots__ = ("_limiter", "_note", "claim", "executions", "holds", "overtaken")

    is_limited = True

    def __init__(self, model_queue: Dispatcher, instance: LimitedInstance, limiter: RateLimiter) -> None:
        super().__init__(model_queue, instance)
        self.claim = instance.claim
        #: How often it has run, and how often others that need the same have since it began to wait.
        self.executions = self.overtaken = 0
        self.holds = False
        self._limiter = limiter
        self._on_threads = False
        self._note, self._remember = self._remember, self._remember_wait

    def _remember_wait(self, closed: Closed) -> None:
        """Have the history say so if resources were what this batch was waiting for, and nothing else."""
        if closed[2] in ("", IDLE_INSTANCE) and self._limiter.is_waiting(self):
            closed = (*closed[:2], RESOURCES, *closed[3:])
        self._note(closed)

    def takes(self, resource: Resource) -> bool:
        """Whether it executes, and holds some of ``resource`` meanwhile."""
        return self.holds and resource in self.claim.units

    @property
    def has_waiting(self) -> bool:
        """Whether there is any request that it could run."""
        return len(self._model_queue.queue) > 0

    def _ask(self) -> list[Ticket]:
        if self.has_waiting and not self._limiter.admits(self):
            self.wait = None
            return []
        batch: list[Ticket] = []
        try:
            batch = super()._ask()
        finally:
            if batch:
                self._limiter.begin(self)
            else:
                self._limiter.withdraw(self)
        return batch

    def take(self, wakeup: Wakeup) -> list[Ticket] | None:
        model_queue, idle = self._model_queue, self._model_queue.idle
        self._wakeup = wakeup
        while not self.closed:
            self.wake_at, self.wait = 0, None
            idle.append(self)
            with suppress(RuntimeError):  # the loop has ended, and the server with it
                model_queue.call_soon_threadsafe(self._come_back)
            wakeup.wait()
            given, self._batch = self._batch, None
            if given:
                return given
        with suppress(RuntimeError):
            model_queue.call_soon_threadsafe(self._limiter.give_back, self)
        self._stand_by(wakeup)
        return None

    def poll(self, wakeup: LoopWakeup) -> list[Ticket] | None:
        self._limiter.give_back(self)
        return super().poll(wakeup)

    def has_run(self) -> None:
        self._limiter.give_back(self)

    def leave(self, wakeup: LoopWakeup) -> None:
        self._limiter.withdraw(self)
        self._limiter.give_back(self)
        super().leave(wakeup)

    def close(self) -> None:
        self._limiter.withdraw(self)
        super().close()

    def _come_back(self) -> None:
        """Its thread has returned from an execution, and is idle."""
        self._limiter.give_back(self)
        if self.closed:
            self.close()
        else:
            self.look()


class RateLimiter:
    """One for all models of a server whose event loop is ``loop``. ``given`` is what the operator says that there is:
    with nothing said, there is as much of a resource as any instance needs.

    `add` and `remove` on any thread, everything else on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, given: Sequence[RateLimitResource] = ()) -> None:
        self._loop = loop
        self._given = given
        self._lock = threading.Lock()
        #: What instances need that are loaded, or being loaded. Compared by identity; under the lock.
        self._claims: dict[Claim, None] = {}
        #: What there is of each resource. Replaced, never changed.
        self._limits: Mapping[Resource, int] = {}
        #: Of each resource, the sum of 1 / priority of those who need it, and how many they are. Replaced likewise.
        self._rivals: Mapping[Resource, tuple[float, int]] = {}
        self._taken: dict[Resource, int] = {}
        self._sources: dict[Claim, LimitedSource] = {}
        #: Those that have something to run and cannot, in the order in which they came, by number.
        self._staged: dict[LimitedSource, int] = {}
        self._numbers = count()
        self._is_looking = False

    # ------------------------------------------------------------------ who there is

    def add(self, claims: Iterable[Claim]) -> None:
        """Let instances in that are about to be loaded. Raises `ConfigError` if one of them could never run, or if
        they are at odds with others about a resource; then nothing has changed."""
        claims = tuple(claims)
        with self._lock:
            together = self._claims | dict.fromkeys(claims)
            self._limits = limits_for(together, self._given)
            self._claims, self._rivals = together, _rivals(together)
        log.debug("%s", shown(self._limits))
        self._tell_loop(claims)

    def remove(self, claims: Iterable[Claim]) -> None:
        """The instances are gone; what they still hold is free. No matter if they are unknown."""
        claims = tuple(claims)
        with self._lock:
            left = {claim: None for claim in self._claims if claim not in claims}
            self._limits = limits_for(left, self._given)
            self._claims, self._rivals = left, _rivals(left)
        log.debug("%s", shown(self._limits))
        self._tell_loop(claims)

    def source(self, model_queue: Dispatcher, instance: InstanceInfo) -> InstanceSource:
        """Where ``instance`` gets its batches from: one that takes nothing does not pass by here."""
        if not isinstance(instance, LimitedInstance):
            return InstanceSource(model_queue, instance)
        source = self._sources[instance.claim] = LimitedSource(model_queue, instance, self)
        return source

    def _tell_loop(self, claims: Sequence[Claim]) -> None:
        with suppress(RuntimeError):  # it has ended, and the server with it
            self._loop.call_soon_threadsafe(self._changed, claims)

    def _changed(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim not in self._claims and (source := self._sources.pop(claim, None)) is not None:
                self._staged.pop(source, None)
                self.give_back(source)
        self._look_soon()

    # ------------------------------------------------------------------ who runs

    @property
    def taken(self) -> Mapping[Resource, int]:
        """What is held now, of the resources of which anything is."""
        return {resource: units for resource, units in self._taken.items() if units}

    def is_waiting(self, source: LimitedSource) -> bool:
        """Whether ``source`` was not admitted when it last had something to run."""
        return source in self._staged

    def uses(self, instances: Sequence[InstanceInfo] | None = None) -> list[ResourceUse]:
        """Who has what now, and who waits: of all resources, or of those that ``instances`` need. Any thread."""
        needed = set(self._limits)
        if instances is not None:
            needed &= {key for each in instances if isinstance(each, LimitedInstance) for key in each.claim.units}
        sources, staged = tuple(self._sources.values()), tuple(self._staged)
        waiting = [source for source in staged if not source.holds and source.has_waiting]
        return [
            ResourceUse(
                resource,
                self._limits.get(resource, 0),
                {each.instance.name: each.claim.units[resource] for each in sources if each.takes(resource)},
                {each.instance.name: each.claim.units[resource] for each in waiting if resource in each.claim.units},
            )
            for resource in sorted(needed, key=lambda each: each.order)
        ]

    def admits(self, source: LimitedSource) -> bool:
        """Whether ``source``, which has something to run, may; if not, it is looked at again when that may change."""
        if not source.holds and self._is_free(source.claim) and not self._is_behind(source):
            return True
        if source not in self._staged:
            self._staged[source] = next(self._numbers)
            log.debug("instance '%s' waits for %s", source.instance.name, source.claim)
        return False

    def kept_waiting_by(self, executor: Executor) -> Sequence[Executor]:
        """Return the executors that ``executor`` waits for: those that hold resources it needs, and those before it in
        line. Empty if it does not wait."""
        waiting = next((source for source in self._staged if source.executor is executor), None)
        if waiting is None or not waiting.has_waiting:
            return ()
        rank = self._rank(waiting)
        return [
            other.executor
            for other in self._sources.values()
            if other is not waiting
            and other.executor is not None
            and other.claim.overlaps(waiting.claim)
            and (other.holds or (other in self._staged and other.has_waiting and self._rank(other) < rank))
        ]

    def begin(self, source: LimitedSource) -> None:
        """``source`` runs: it takes what it needs."""
        self._staged.pop(source, None)
        source.holds, source.overtaken = True, 0
        source.executions += 1
        for resource, units in source.claim.units.items():
            self._taken[resource] = self._taken.get(resource, 0) + units
        for other in self._staged:
            if other.claim.overlaps(source.claim):
                other.overtaken += 1

    def withdraw(self, source: LimitedSource) -> None:
        """``source`` has nothing to run after all; those behind it may."""
        if self._staged.pop(source, None) is not None:
            source.overtaken = 0
            self._look_soon()

    def give_back(self, source: LimitedSource) -> None:
        """``source`` runs no more; nothing if it did not."""
        if not source.holds:
            return
        source.holds = False
        for resource, units in source.claim.units.items():
            self._taken[resource] -= units
        self._look_soon()

    def _is_free(self, claim: Claim) -> bool:
        taken, limits = self._taken, self._limits
        return all(taken.get(resource, 0) + units <= limits.get(resource, 0) for resource, units in claim.units.items())

    def _is_behind(self, source: LimitedSource) -> bool:
        """Whether somebody else who waits for any of the same comes first."""
        rank = self._rank(source)
        return any(
            other is not source
            and other.claim.overlaps(source.claim)
            and other.has_waiting
            and self._rank(other) < rank
            for other in self._staged
        )

    def _rank(self, source: LimitedSource) -> tuple[bool, int, int, float]:
        """Return what sorts those who wait: who has waited beyond its share first, then who has the fewest executions
        for its priority, then who has the better priority, then who came first."""
        claim = source.claim
        return (
            source.overtaken <= self._share(claim),
            source.executions * claim.priority,
            claim.priority,
            self._staged.get(source, float("inf")),
        )

    def _share(self, claim: Claim) -> float:
        """How often others go first at most, while ``claim`` waits, if all have waited all the time."""
        rivals = [self._rivals.get(resource, (0.0, 0)) for resource in claim.units]
        return sum(claim.priority * shares + 2 * number for shares, number in rivals)

    def _look_soon(self) -> None:
        if self._staged and not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Offer what has become free to those who wait, in their order."""
        self._is_looking = False
        for source in sorted(self._staged, key=self._rank):
            if source in self._staged and not source.look():
                self._staged.pop(source, None)  # it is not idle: it will ask by itself


def _rivals(claims: Iterable[Claim]) -> dict[Resource, tuple[float, int]]:
    rivals: dict[Resource, tuple[float, int]] = {}
    for claim in claims:
        for resource in claim.units:
            shares, number = rivals.get(resource, (0.0, 0))
            rivals[resource] = shares + 1 / claim.priority, number + 1
    return rivals
