"""Both strategies pass the kit for schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from headrace_testing import SchedulerConformance


class Sequences(SchedulerConformance):
    """Each request of the kit is its own sequence."""

    plugin, scheduler = "headrace_sequence", "sequence_batching"
    most_rows = 1
    any_instance = False  # a sequence has a slot of one instance

    def fields(self, number: int) -> Mapping[str, Any]:
        return {"sequence_id": number + 1, "sequence_start": True, "sequence_end": True}


class TestDirect(Sequences):
    config = "sequence_batching { direct { } }"
    mistakes: ClassVar = {
        "sequence_batching { direct { minimum_slot_utilization: 2 } }": (
            "sequence_batching.direct.minimum_slot_utilization"
        ),
        "sequence_batching { control_input { } }": "sequence_batching.control_input[0].name",
        'sequence_batching { state { input_name: "a" } }': "sequence_batching.state[0].output_name",
    }
    in_order = False  # they run in the order of their slots


class TestDirectThatWaitsForFullerBatches(Sequences):
    config = "sequence_batching { direct { max_queue_delay_microseconds: 5000 minimum_slot_utilization: 1 } }"
    in_order, delay_ns = False, 5_000_000


class TestOldest(Sequences):
    config = "sequence_batching { oldest { } }"


class TestOldestThatWaitsForFullerBatches(Sequences):
    config = """sequence_batching { oldest {
        max_candidate_sequences: 20 preferred_batch_size: [4, 8] max_queue_delay_microseconds: 5000
    } }"""
    delay_ns = 5_000_000


class TestIterativeDirect(Sequences):
    config = "sequence_batching { iterative_sequence: true direct { } }"
    in_order = False

    def fields(self, number: int) -> Mapping[str, Any]:
        return {}


class TestIterativeOldest(TestIterativeDirect):
    config = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 12 } }"
    in_order = True


class TestOldestThatKeepsOrder(Sequences):
    config = "sequence_batching { oldest { max_candidate_sequences: 3 preserve_ordering: true } }"


class TestImplicitState(Sequences):
    config = """sequence_batching { direct { }
        state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 1 ] } }"""
    in_order = False

    def test_a_server_finds_and_serves_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.not_claimed("the model of the kit gives no state; test_state.py has one that does")
