"""Sequence batching: requests that belong together run in order, on one instance, with what they have in common.

A model whose config has ``sequence_batching`` gets this scheduler. A sequence begins with a request that has
``sequence_start`` and an id, and ends with one that has ``sequence_end``. As long as it lives it has a slot of an
instance, or waits in the backlog until one is free. Source: docs/spec/behaviours.md sections 4.7, 6.4 and 6.5.

====================== ================================================================================
``sequence_scheduler`` takes requests in, finds their sequences, and ends those that are idle or whose caller has gone
``sequence_rules``     the rules of ``sequence_batching`` that a config must keep
``admission``          which requests begin a sequence, and what the others are told
``slots``              which slots are free, and who waits for one
``batcher``            what both strategies have in common: the sequences of one instance
``direct``             strategy ``direct``: a slot is a place in every batch
``oldest``             strategy ``oldest``: the oldest requests of the candidates form a batch
``added_inputs``       what the model is told of each request: start, ready, end, the id
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
