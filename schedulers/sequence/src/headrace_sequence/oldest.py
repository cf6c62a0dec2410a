"""Strategy ``oldest``: the oldest requests of the candidates form a batch, at most one per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from headrace import Batch, ModelConfig, Ticket, Wait
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.batcher import Batcher, Release
from headrace_sequence.live import LiveSequence


class OldestBatcher(Batcher):
    """Batches like the dynamic batcher, from the first requests of the sequences that have none running."""

    one_at_a_time = True

    def __init__(
        self, config: ModelConfig, size: int, inputs: AddedInputs, release: Release | None, holds: bool = False
    ) -> None:
        oldest = config.sequence_batching.oldest
        super().__init__(config, size, inputs, release, holds or oldest.preserve_ordering)
        self._rows = rows = max(1, config.max_batch_size)
        self._delay_ns = oldest.max_queue_delay_microseconds * 1000
        sizes = (
            sorted(set(oldest.preferred_batch_size) | {rows})
            if not oldest.preferred_batch_size
            else sorted(set(oldest.preferred_batch_size))
        )
        #: The largest preferred size reached (0 for none) and the next one, by the number of stacked requests.
        self._preferred = [max((size for size in sizes if size <= count), default=0) for count in range(rows + 1)]
        self._next_size = [min((size for size in sizes if size > count), default=rows) for count in range(rows + 1)]

    def choose(self, now_ns: int) -> Sequence[Ticket] | Wait:
        stacked, complete = self._stacked()
        count, preferred = len(stacked), self._preferred[len(stacked)]
        reason = complete or "idle_instance"
        wait_ns = stacked[0].ready_ns + self._delay_ns - now_ns
        if self._delay_ns and wait_ns <= 0:
            reason = complete or "delay"
        elif preferred:
            count, reason = preferred, "full" if preferred == self._rows else "preferred_size"
        elif self._delay_ns and not complete:
            return Wait(wait_ns, self._next_size[count] - count)
        taken = [self.take(sequence) for sequence in stacked[:count]]
        return Batch([ticket for ticket, _ in taken], [added for _, added in taken], True, reason, count)

    def _stacked(self) -> tuple[list[LiveSequence], str]:
        """Return the first ready sequences that fit into a batch, and why no more fit, if that is so."""
        stacked = list(islice(self.ready, self._rows))
        keys = self.inputs.keys(stacked)
        if keys.count(keys[0]) == len(keys):
            return stacked, "full" if len(keys) == self._rows else ""
        return stacked[: next(at for at, key in enumerate(keys) if key != keys[0])], "shape_break"
