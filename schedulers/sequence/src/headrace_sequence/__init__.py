"""Sequence batching: the requests of a sequence run in order on one instance, with their state.

A model whose config has ``sequence_batching`` gets this scheduler. A sequence begins with a request that has
``sequence_start`` and an id, and ends with one that has ``sequence_end``. A live sequence has a slot of an instance,
or waits in the backlog for one. Source: docs/spec/behaviours.md sections 4.7, 6.4 and 6.5.

====================== ================================================================================
``sequence_scheduler`` assigns requests to sequences, and ends idle and cancelled sequences
``sequence_rules``     the rules of ``sequence_batching`` that a config must keep
``admission``          the requests that start a sequence, and the errors of others
``slots``              the free slots, and the sequences that wait for one
``batcher``            the base of both strategies: the sequences of one instance
``direct``             strategy ``direct``: a slot is a row of every batch
``oldest``             strategy ``oldest``: the oldest requests of the candidates form a batch
``added_inputs``       the control inputs of each request: start, ready, end, the id
``implicit_states``    outputs that are inputs of the next request
====================== ================================================================================
"""

from __future__ import annotations

from headrace import Extension, Scheduler, hookimpl
from headrace_sequence.sequence_scheduler import SequenceScheduler

__all__ = ["SequenceScheduler"]


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    return [SequenceScheduler]


class Sequence(Extension):
    """The parameters ``sequence_id``, ``sequence_start`` and ``sequence_end`` of requests."""

    name = "sequence"
    announces = ("sequence",)


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Sequence]
