"""The scheduler ``sequence_batching``: assigns requests to sequences, and ends sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from headrace import (
    Answer,
    Cancelled,
    FullScheduler,
    HeadraceError,
    InferResponse,
    InstanceInfo,
    ModelConfig,
    Problem,
    PublishedMetric,
    SchedulerContext,
    Tensor,
    Ticket,
    Unavailable,
    Wait,
    rate_limited_logger,
)
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.admission import Admission
from headrace_sequence.batcher import Batcher
from headrace_sequence.direct import DirectBatcher
from headrace_sequence.implicit_states import States
from headrace_sequence.live import LiveSequence
from headrace_sequence.oldest import OldestBatcher
from headrace_sequence.sequence_rules import check, check_states
from headrace_sequence.slots import SlotTable

log = rate_limited_logger("headrace.sequence_batching")


class SequenceScheduler(FullScheduler):
    """Runs the requests of a sequence in order on one instance, by the config's ``sequence_batching``."""

    name: ClassVar[str] = "sequence_batching"
    is_stateful: ClassVar[bool] = True
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric("headrace_sequences_active", "Number of sequences that have a slot"),
        PublishedMetric("headrace_sequences_backlogged", "Number of sequences that wait for a slot"),
        PublishedMetric(
            "headrace_sequences_expired_total", "Number of sequences that ended because they were idle", "counter"
        ),
    )

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        config, batching = context.config, context.config.sequence_batching
        self._model = config.name
        self._iterates = self.reschedules(config)
        self._idle_ns = batching.max_sequence_idle_microseconds * 1000
        self._states = States(config, context.directory)
        self._inputs = AddedInputs(config, self._states)
        self._admission = Admission(config.name, self._inputs)
        self.kept = self._states.kept
        self._has_states = bool(self.kept)
        is_oldest = batching.HasField("oldest")
        self._kind = OldestBatcher if is_oldest else DirectBatcher
        self._most = batching.oldest.max_candidate_sequences if is_oldest else 0
        self._batchers = {instance: self._batcher(instance) for instance in context.instances}
        self._slots = SlotTable(tuple(self._batchers.values()))
        #: The sequences that accept further requests, by id. 1 and "1" differ.
        self._live: dict[int | str, LiveSequence] = {}
        #: The sequence of each waiting or running request.
        self._sequences: dict[Ticket, LiveSequence] = {}
        self._now_ns = context.clock.now_ns
        #: The number of sequences that ended because they were idle.
        self.expired_sequences = 0
        self._is_delayed = bool(context.delayed_start.requests or context.delayed_start.backlog)
        if self._is_delayed:
            self.next = self._next_after_delay  # type: ignore[method-assign]  # a server that is not tested has no such step

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        yield from check(config)
        if completed:
            yield from check_states(config)

    @classmethod
    def reschedules(cls, config: ModelConfig) -> bool:
        return config.sequence_batching.iterative_sequence

    @property
    def active(self) -> int:
        """The number of sequences with a slot."""
        return sum(batcher.seated for batcher in self._batchers.values())

    @property
    def backlogged(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._slots.backlog)

    def measure(self) -> Mapping[str, float]:
        active, backlogged, expired = (metric.name for metric in self.metrics)
        return {active: self.active, backlogged: self.backlogged, expired: self.expired_sequences}

    # ------------------------------------------------------------------ requests

    def submit(self, ticket: Ticket) -> int | None:
        is_private = False
        if self._iterates:
            is_private = not ticket.request.sequence_id
            ticket.request = self._admission.named(ticket.request, self._live)
        request = ticket.request
        sequence = self._live.get(request.sequence_id)
        if sequence is None or ticket.rows != 1:
            sequence = self._begin(ticket, is_private)
        elif request.sequence_start and not self._iterates:
            log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                sequence.id,
                self._model,
                extra={"model": self._model},
            )
        self._sequences[ticket] = sequence
        sequence.tickets.append(ticket)
        sequence.touched_ns = now_ns = ticket.queued_ns
        if request.sequence_end and not self._iterates:  # an iterative one lives until its last answer
            self._remove(sequence)
        if sequence.batcher is None:
            if request.timeout_us:
                ticket.deadline_ns = now_ns + request.timeout_us * 1000
        elif len(sequence.tickets) == 1:
            sequence.batcher.arrived(sequence, now_ns)
        return None

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return self._batchers[instance].next(now_ns)

    def _next_after_delay(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return nothing until the number of requests that a test has set wait. Then do as `next`."""
        if self._is_delayed:
            backlog = sum(len(sequence.tickets) for sequence in self._slots.backlog)
            until = self.context.delayed_start
            self._is_delayed = len(self.context.waiting) - backlog < until.requests or backlog < until.backlog
        return () if self._is_delayed else SequenceScheduler.next(self, instance, now_ns)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        now_ns, find = self._now_ns(), self._sequences.pop
        batcher = None if instance is None else self._batchers[instance]
        for ticket, answer in zip(tickets, answers, strict=True):
            sequence = find(ticket, None)
            if sequence is None:  # padding, or answered here
                continue
            sequence.touched_ns = now_ns
            if batcher is None:
                if isinstance(answer, HeadraceError):
                    sequence.tickets.remove(ticket)
                    self._left(sequence, answer)
                continue
            if self._has_states and isinstance(answer, InferResponse):
                self._states.update(sequence, answer.outputs)
            batcher.finished(sequence, now_ns)
            if ticket.cancelled or self._iterates:
                self._left(sequence, Cancelled("request was cancelled"))
            elif not sequence.tickets and sequence.timer is None:
                self._start_idle_timer(sequence, self._idle_ns)

    def rescheduled(self, ticket: Ticket, outputs: Mapping[str, Tensor], instance: InstanceInfo) -> int | None:
        """Run the request again: in its slot, with its state, together with new requests."""
        sequence, request = self._sequences[ticket], ticket.request
        if sequence.batcher is None:  # the sequence was ended
            raise Cancelled(f"{request.log_id}request was cancelled")
        if self._has_states:
            self._states.update(sequence, outputs)
        ticket.request = request.with_sequence(sequence.id, False, False)
        self._batchers[instance].requeue(sequence, ticket, self._now_ns())
        return None

    def continues(self, ticket: Ticket) -> bool:
        """True for a request of a live sequence, which may end."""
        return not (self._iterates or ticket.request.sequence_start)

    def expired(self, ticket: Ticket) -> int | None:
        """Reject a request in the backlog, with its whole sequence. Only requests in the backlog expire.

        A request of an iterative model is its own sequence, and is rejected alone.
        """
        sequence = self._sequences[ticket]
        if sequence.batcher is not None:
            return 1
        why = Unavailable("timeout of the corresponding sequence has been expired")
        if self._iterates:
            sequence.tickets.remove(ticket)
            self._answer((ticket,), why)
            self._left(sequence, why)
        else:
            self._end(sequence, why)
        return None

    def close(self) -> None:
        for sequence in tuple(self._live.values()):
            self._remove(sequence)

    # ------------------------------------------------------------------ instances that come and go

    def _batcher(self, instance: InstanceInfo) -> Batcher:
        size = self._most or instance.slots
        release = None if self._iterates else self._release
        return self._kind(self.context.config, size, self._inputs, release, holds=self._has_states)

    def instances_changed(self) -> None:
        """Keep sequences on their instance until they end. None begins on an instance that is being removed."""
        now_ns = self._now_ns()
        for instance in set(self._batchers).difference(self.context.instances):
            self._slots.remove(self._batchers[instance])
        for instance in self.context.instances:
            if instance not in self._batchers:
                batcher = self._batchers[instance] = self._batcher(instance)
                self._slots.add(batcher, now_ns)

    def lets_go(self, instance: InstanceInfo) -> bool:
        batcher = self._batchers.get(instance)
        if batcher is not None and batcher.is_empty:
            del self._batchers[instance]
        return instance not in self._batchers

    # ------------------------------------------------------------------ sequences

    def _begin(self, ticket: Ticket, is_private: bool) -> LiveSequence:
        """Return the sequence that the request of ``ticket`` starts. Raise if it cannot start one.

        If ``is_private``, the server generated its id.
        """
        self._admission.check(ticket)
        key = ticket.request.sequence_id
        sequence = self._live[key] = LiveSequence(key, is_private)
        self._slots.admit(sequence, ticket.queued_ns)
        return sequence

    def _remove(self, sequence: LiveSequence) -> None:
        """Accept no further requests for ``sequence``. Its present ones still run."""
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
        if sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None

    def _release(self, sequence: LiveSequence) -> None:
        self._slots.release(sequence, self._now_ns())

    def _left(self, sequence: LiveSequence, why: HeadraceError) -> None:
        """Handle the end of a request of ``sequence``: end its other requests for the same reason, ``why``.

        Each request of an iterative model is its own sequence: others with the same id run after it.
        """
        if not self._iterates:
            self._end(sequence, why)
        elif not (sequence.tickets or sequence.running):
            self._remove(sequence)
            self._release(sequence)

    def _end(self, sequence: LiveSequence, why: HeadraceError) -> None:
        """End ``sequence`` now: free its slot, and answer its waiting requests with ``why``."""
        tickets = tuple(sequence.tickets)
        sequence.tickets.clear()
        self._remove(sequence)
        self._release(sequence)
        self._answer(tickets, why)

    def _answer(self, tickets: Sequence[Ticket], why: HeadraceError) -> None:
        """Answer the waiting ``tickets`` with ``why``."""
        for ticket in tickets:
            del self._sequences[ticket]
        for ticket in tickets:
            is_cancelled = isinstance(why, Cancelled)
            answer = Cancelled(f"{ticket.request.log_id}request was cancelled") if is_cancelled else why
            self.context.answer(ticket, answer, True)

    # ------------------------------------------------------------------ idle sequences

    def _start_idle_timer(self, sequence: LiveSequence, delay_ns: int) -> None:
        """Check in ``delay_ns`` if ``sequence`` is idle."""
        if self._live.get(sequence.id) is sequence:
            sequence.timer = self.context.clock.call_later(delay_ns, self._check_idle, sequence)

    def _check_idle(self, sequence: LiveSequence) -> None:
        sequence.timer = None
        if sequence.tickets or sequence.running:  # its answer starts the timer again
            return
        left_ns = sequence.touched_ns + self._idle_ns - self._now_ns()
        if left_ns > 0:
            self._start_idle_timer(sequence, left_ns)
            return
        log.info(
            "sequence %s of model '%s' has ended: it was idle for %d us",
            sequence.id,
            self._model,
            self._idle_ns // 1000,
            extra={"model": self._model},
        )
        self.expired_sequences += 1
        self._remove(sequence)
        self._release(sequence)
        self.context.ask_again()
