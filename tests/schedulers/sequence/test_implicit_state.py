"""State that the server keeps: what the model gave with one request is what it gets with the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from headrace import BackendError, BytesTensor, ConfigError
from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.response import InferResponse
from headrace_sequence import SequenceScheduler
from headrace_sequence.implicit_states import States
from headrace_testing.simulator import run_scenario

from .conftest import SequenceSimulator, inputs_of, is_null

STATE = 'state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: {} {} }}'
INITIAL = 'initial_state {{ name: "i" data_type: {} dims: {} {} }}'


def states_of(simulator: SequenceSimulator) -> list[Any]:
    return [inputs_of(ticket).get("s") for ticket in simulator.instances[0].batch]


def state_responses(*values: Any) -> list[InferResponse]:
    """Answers with these states."""
    return [InferResponse({"t": np.array([value], np.float32)}) for value in values]


def test_each_sequence_has_its_own_state_and_an_empty_slot_zeros() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }" + STATE.format(1, ""), rows=3)
        first, *_ = simulator.send_words("1S", "2S", "3S")
        await simulator.settle()
        assert states_of(simulator) == [[[0]], [[0]], [[0]]]
        simulator.respond(state_responses([1], [2], [3]))
        await simulator.settle()
        (answer_of_first,) = simulator.answers_to(first)
        assert isinstance(answer_of_first, InferResponse)
        assert answer_of_first.outputs == {}  # the caller does not get it
        simulator.send_words("3", "1")
        await simulator.settle()
        assert states_of(simulator) == [[[1]], [[0]], [[3]]]
        assert [is_null(ticket) for ticket in simulator.instances[0].batch] == [False, True, False]
        simulator.respond(state_responses([4], [9], [6]))
        simulator.send_words("1", "2", "3S")
        await simulator.settle()
        assert states_of(simulator) == [[[4]], [[2]], [[0]]]

    run_scenario(scenario)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_a_failed_request_does_not_change_the_state(strategy: str) -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator(strategy + STATE.format(1, ""))
        simulator.send_words("1S", "1", "1", "1")
        await simulator.settle()
        simulator.respond(state_responses([5]))
        await simulator.settle()
        simulator.instances[0].finish(BackendError("broken"))
        await simulator.settle()
        assert states_of(simulator) == [[[5]]]
        simulator.respond([InferResponse({})])  # nor does a response without a state
        await simulator.settle()
        assert states_of(simulator) == [[[5]]]

    run_scenario(scenario)


def test_an_instance_gets_nothing_until_the_states_exist() -> None:
    """A thread may poll again before the event loop has received its responses."""

    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }" + STATE.format(1, ""))
        simulator.send_words("1S", "1")
        await simulator.settle()
        played = simulator.instances[0]
        batch, played.batch = played.batch, []
        played.poll()
        assert played.batch == []
        simulator.model_queue.sources[0].deliver(batch, state_responses([7]))
        await simulator.settle()
        assert states_of(simulator) == [[[7]]]

    run_scenario(scenario)


def test_a_state_is_a_copy_of_the_model_output() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }" + STATE.format(1, ""))
        simulator.send_words("1S", "1")
        await simulator.settle()
        (answer,) = state_responses([5])
        gave = answer.outputs["t"]
        simulator.respond([answer])
        np.asarray(gave)[:] = 6
        await simulator.settle()
        assert states_of(simulator) == [[[5]]]

    run_scenario(scenario)


def test_requests_with_states_of_different_shape_run_separately() -> None:
    async def scenario() -> None:
        simulator = SequenceSimulator("direct { }" + STATE.format(-1, ""), rows=2)
        simulator.send_words("1S", "2S")
        await simulator.settle()
        assert states_of(simulator) == [[[0]], [[0]]]  # a variable dimension begins as one
        simulator.respond(state_responses([1, 1], [2]))
        simulator.send_words("1", "2")
        await simulator.settle()
        assert await simulator.running() == [["1"]]
        assert states_of(simulator) == [[[1, 1]]]
        simulator.respond(state_responses([1, 1, 1]))
        await simulator.settle()
        assert await simulator.running() == [["-", "2"]]
        assert states_of(simulator) == [[[0]], [[2]]]

    run_scenario(scenario)


def states(text: str, directory: Path | None = None, rows: int = 2) -> States:
    config = f'name: "model" max_batch_size: {rows} sequence_batching {{ {text} }}'
    return States(text_format.Parse(config, ModelConfig()), directory)


def test_an_initial_state_is_zero_or_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state/numbers").write_bytes(np.arange(7, dtype=np.float32).tobytes())
    (tmp_path / "initial_state/words").write_bytes(b"\x02\0\0\0ab\0\0\0\0\x01\0\0\0c\x04\0\0\0more")
    zero = states(STATE.format("[2, -1]", INITIAL.format("TYPE_FP32", "[2, 3]", "zero_data: true")))
    np.testing.assert_array_equal(np.asarray(zero.initial["s"]), np.zeros((1, 2, 3), np.float32))
    numbers = STATE.format("[-1, 3]", INITIAL.format("TYPE_FP32", "[2, 3]", 'data_file: "numbers"'))
    for rows, batch in ((2, (1,)), (0, ())):
        initial = np.asarray(states(numbers, tmp_path, rows).initial["s"])
        np.testing.assert_array_equal(initial, np.arange(6, dtype=np.float32).reshape(*batch, 2, 3))
        assert not initial.flags.writeable
    words = STATE.format("3", INITIAL.format("TYPE_STRING", 3, 'data_file: "words"')).replace("FP32", "STRING")
    text = states(words, tmp_path).initial["s"]
    assert isinstance(text, BytesTensor)
    assert (text.shape, text.items()) == ((1, 3), [b"ab", b"", b"c"])
    empty = states(STATE.format(2, "").replace("FP32", "STRING")).initial["s"]
    assert isinstance(empty, BytesTensor)
    assert empty.items() == [b"", b""]


@pytest.mark.parametrize(
    ("file", "kind", "reason"),
    [
        ("short", "FP32", "initial_state setting expects 12 bytes, but the data provided from shortonly has 11 bytes."),
        ("none", "FP32", "initial_state cannot be read from '{}/initial_state/none': No such file or directory"),
        ("few", "STRING", "initial_state setting expects 12 bytes, but the data provided from fewonly has 5 bytes."),
        ("cut", "STRING", "initial_state in 'cut': string element 0 runs 3 bytes past the end of the data"),
    ],
)
def test_a_file_of_the_wrong_size_for_a_state_is_refused(file: str, kind: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    for name, content in (("short", bytes(11)), ("few", b"\x01\0\0\0a"), ("cut", b"\x05\0\0\0ab")):
        (tmp_path / "initial_state" / name).write_bytes(content)
    text = STATE.format(3, INITIAL.format("TYPE_FP32", 3, f'data_file: "{file}"')).replace("FP32", kind)
    with pytest.raises(ConfigError) as refusal:
        states(text, tmp_path)
    assert refusal.value.message == reason.format(tmp_path)


def test_the_scheduler_keeps_what_is_a_state() -> None:
    async def scenario() -> None:
        kept_specs = SequenceSimulator("direct { }" + STATE.format(1, "")).model_queue.full_scheduler.kept
        assert [(spec.name, spec.datatype.name, spec.dims) for spec in kept_specs.values()] == [("t", "FP32", (1,))]

    run_scenario(scenario)
    assert SequenceScheduler.name == "sequence_batching"
