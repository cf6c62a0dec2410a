"""The real model queue and sequence scheduler, with a manual clock and simulated instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import text_format

from headrace import Padding, Ticket
from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.response import Answer, InferResponse
from headrace_sequence import SequenceScheduler
from headrace_testing.simulator import SchedulerSimulator

MS = 1_000_000
CONTROLS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
_FLAGS = {"S": "sequence_start", "E": "sequence_end"}


class SequenceSimulator(SchedulerSimulator):
    """A simulator whose requests are written ``7S``, the start of sequence 7; ``7E`` is its end and ``7SE`` both."""

    def __init__(self, batching: str, rows: int = 2, instances: int = 1, controls: str = CONTROLS) -> None:
        text = f'name: "model" max_batch_size: {rows} sequence_batching {{ {controls} {batching} }}'
        super().__init__(SequenceScheduler, text_format.Parse(text, ModelConfig()), instances)
        self.poll_instances()
        self.names: dict[Ticket, str] = {}

    def send_words(self, *words: str, **fields: Any) -> list[Ticket]:
        """Send the requests ``words``, in order."""
        sent = []
        for word in words:
            name = word.rstrip("SE")
            flags = {_FLAGS[flag]: True for flag in word[len(name) :]}
            sent.append(self.send(sequence_id=int(name), **{**flags, **fields}))
            self.names[sent[-1]] = word
        return sent

    async def running(self) -> list[list[str]]:
        """Return the request that each instance runs now, by slot; ``-`` is an empty slot."""
        await self.settle()
        self.check()
        return [[self.names.get(ticket, "-") for ticket in instance.batch] for instance in self.instances]

    async def step(self) -> list[list[str]]:
        """Return `running`, then finish every batch."""
        running = await self.running()
        for instance in self.instances:
            if instance.batch:
                instance.finish()
        return running

    def respond(self, answers: Sequence[Answer], instance: int = 0) -> None:
        """Answer the batch of the instance with ``answers``, one per request."""
        simulated = self.instances[instance]
        batch, simulated.batch = simulated.batch, []
        self.model_queue.sources[instance].deliver(batch, answers)
        simulated.poll()


def inputs_of(ticket: Ticket) -> dict[str, Any]:
    """Return the inputs of a running request, as lists."""
    inputs: Mapping[str, Any] = ticket.request.inputs
    return {name: np.asarray(tensor).tolist() for name, tensor in inputs.items()}


def flags_of(batch: Sequence[Ticket]) -> list[tuple[int, ...]]:
    """Return READY, START, END and the id of each slot of a batch."""
    return [tuple(inputs_of(ticket)[name][0][0] for name in ("READY", "START", "END", "ID")) for ticket in batch]


def is_answered(simulator: SchedulerSimulator, ticket: Ticket) -> bool:
    answers = simulator.answers_to(ticket)
    return len(answers) == 1 and isinstance(answers[0], InferResponse)


def is_null(ticket: Ticket) -> bool:
    return isinstance(ticket, Padding)
