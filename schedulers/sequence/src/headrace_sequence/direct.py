"""Strategy ``direct``: a slot is a fixed place in every batch, for models that keep a state per place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from headrace import Batch, ModelConfig, Padding, Tensor, Ticket, Wait
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.batcher import Batcher, Release
from headrace_sequence.live import LiveSequence

_NOTHING: Mapping[str, Tensor] = {}


class DirectBatcher(Batcher):
    """A batch has all slots from the first to the last with a request to run, in order.

    A slot without a request gets padding. So does a slot with a request that does not stack with the first: it runs in
    the next batch.
    """

    def __init__(
        self, config: ModelConfig, size: int, inputs: AddedInputs, release: Release | None, holds: bool = False
    ) -> None:
        super().__init__(config, size, inputs, release, holds)
        direct = config.sequence_batching.direct
        self._delay_ns = direct.max_queue_delay_microseconds * 1000
        #: With fewer ready sequences than this, the first request waits up to the delay.
        self._wanted = ceil(direct.minimum_slot_utilization * size) if self._delay_ns else 0
        self._nulls: list[Padding] = []
        self._null_key: object = self

    def choose(self, now_ns: int) -> Sequence[Ticket] | Wait:
        count = len(self.ready)
        reason, missing = "full" if count == len(self.slots) else "idle_instance", self._wanted - count
        if missing > 0:
            since_ns = min([sequence.tickets[0].queued_ns for sequence in self.ready])
            if (wait_ns := since_ns + self._delay_ns - now_ns) > 0:
                return Wait(wait_ns, missing)
            reason = "delay"
        return self._batch(reason)

    def _batch(self, reason: str) -> Batch:
        ready = self.ready
        stacked = [sequence for sequence in self.slots if sequence is not None and sequence in ready]
        first, keys = stacked[0], self.inputs.keys(stacked)
        key = keys[0]
        if keys.count(key) < len(keys):
            stacked = [sequence for sequence, own in zip(stacked, keys, strict=True) if own == key]
        gaps = stacked[-1].slot + 1 - len(stacked)
        nulls = iter(self._padding(first, key, gaps) if gaps else ())
        tickets: list[Ticket] = []
        added: list[Mapping[str, Tensor]] = []
        for sequence in stacked:
            while len(tickets) < sequence.slot:
                tickets.append(next(nulls))
                added.append(_NOTHING)
            ticket, inputs = self.take(sequence)
            tickets.append(ticket)
            added.append(inputs)
        return Batch(tickets, added, True, reason, len(stacked))

    def _padding(self, sequence: LiveSequence, key: object, count: int) -> list[Padding]:
        """Return ``count`` padding requests beside the next of ``sequence``.

        They are reused for batches with the same ``key``, because an instance runs one batch at a time.
        """
        if key != self._null_key:
            self._nulls, self._null_key = [], key
        if len(self._nulls) < count:
            inputs = self.inputs.null(sequence)
            self._nulls += [Padding(self.config.name, inputs) for _ in range(count - len(self._nulls))]
        return self._nulls
