"""The scheduler on a stage: the real model queue, a clock that stands still, and instances that the test plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import text_format

from headrace import Padding, Ticket
from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.response import Answer, InferResponse
from headrace_sequence import SequenceScheduler
from headrace_testing.stage import Stage

MS = 1_000_000
CONTROLS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
_FLAGS = {"S": "sequence_start", "E": "sequence_end"}


class Theatre(Stage):
    """A stage whose requests are written ``7S``: of sequence 7, its start; ``7E`` is its end and ``7SE`` both."""

    def __init__(self, batching: str, rows: int = 2, instances: int = 1, controls: str = CONTROLS) -> None:
        text = f'name: "model" max_batch_size: {rows} sequence_batching {{ {controls} {batching} }}'
        super().__init__(SequenceScheduler, text_format.Parse(text, ModelConfig()), instances)
        self.begin()
        self.names: dict[Ticket, str] = {}

    def ask(self, *words: str, **fields: Any) -> list[Ticket]:
        """Send the requests ``words``, in order."""
        asked = []
        for word in words:
            name = word.rstrip("SE")
            flags = {_FLAGS[flag]: True for flag in word[len(name) :]}
            asked.append(self.send(sequence_id=int(name), **{**flags, **fields}))
            self.names[asked[-1]] = word
        return asked

    async def shown(self) -> list[list[str]]:
        """Return the request that each instance runs now, by slot; ``-`` is an empty slot."""
        await self.settle()
        self.check()
        return [[self.names.get(ticket, "-") for ticket in instance.batch] for instance in self.instances]

    async def step(self) -> list[list[str]]:
        """`shown`, and then all that runs is finished."""
        shown = await self.shown()
        for instance in self.instances:
            if instance.batch:
                instance.finish()
        return shown

    def give(self, answers: Sequence[Answer], instance: int = 0) -> None:
        """Answer what the instance runs, each request with its own."""
        played = self.instances[instance]
        batch, played.batch = played.batch, []
        self.model_queue.sources[instance].deliver(batch, answers)
        played.ask()

    def told(self, ticket: Ticket) -> list[Answer]:
        return super().told(ticket)


def inputs_of(ticket: Ticket) -> dict[str, Any]:
    """The inputs of what runs, as lists."""
    inputs: Mapping[str, Any] = ticket.request.inputs
    return {name: np.asarray(tensor).tolist() for name, tensor in inputs.items()}


def flags_of(batch: Sequence[Ticket]) -> list[tuple[int, ...]]:
    """READY, START, END and the id, of each slot of a batch."""
    return [tuple(inputs_of(ticket)[name][0][0] for name in ("READY", "START", "END", "ID")) for ticket in batch]


def is_answered(stage: Stage, ticket: Ticket) -> bool:
    told = stage.told(ticket)
    return len(told) == 1 and isinstance(told[0], InferResponse)


def is_null(ticket: Ticket) -> bool:
    return isinstance(ticket, Padding)
