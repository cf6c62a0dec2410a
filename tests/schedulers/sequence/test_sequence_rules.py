"""Rules of ``sequence_batching``: valid configs pass, and each invalid one is refused with the exact text.

Texts are Triton's (docs/spec/behaviours.md section 4.7) where it has one; where it has none, the text names the thing,
the value and the rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace import Code, HeadraceError, ModelConfig, Problem, Server
from headrace.config.derive import derive
from headrace.config.validation import problems
from headrace_sequence import SequenceScheduler

BASE = 'name: "m" backend: "identity" max_batch_size: 8 '
IO = 'input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] } '
BIG = 9223372036854775807
S = 'input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [2, -1] '
INITIAL = 'name: "zero" data_type: TYPE_FP32 dims: [2, 3] '


def control(control: str) -> str:
    return f'{BASE}{IO}sequence_batching {{ control_input {{ name: "C" control {{ {control} }} }} }}'


def state(state: str) -> str:
    return f"{BASE}{IO}sequence_batching {{ state {{ {state} }} }}"


GOOD = {
    "sequences": f"""backend: "identity" max_batch_size: 8 {IO}
        sequence_batching {{
          direct {{ max_queue_delay_microseconds: 5 minimum_slot_utilization: 1.0 }}
          control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }} }}
          control_input {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] }} }}
          control_input {{ name: "END" control {{ kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] }} }}
          control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }} }}
        }}""",
    "oldest_sequences": f"""backend: "identity" max_batch_size: 8 {IO}
        sequence_batching {{ iterative_sequence: true
          oldest {{ max_candidate_sequences: 1024 preferred_batch_size: [4, 8] preserve_ordering: true }} }}""",
    "states": f"""backend: "identity" max_batch_size: 8 {IO}
        sequence_batching {{
          state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [-1, 3]
            initial_state {{ name: "i" data_type: TYPE_FP32 dims: [1, 3] zero_data: true }} }}
          state {{ input_name: "u" output_name: "v" data_type: TYPE_STRING dims: 1
            initial_state {{ name: "j" data_type: TYPE_STRING dims: 1 data_file: "words" }} }}
        }}""",
}

SEQUENCES = [
    (
        "control_name",
        f"{BASE} sequence_batching {{ control_input {{ control {{ int32_false_true: [0, 1] }} }} }}",
        "sequence batching control tensor must have a name for m",
    ),
    (
        "control_twice",
        f'{BASE} sequence_batching {{ control_input {{ name: "C" }} control_input {{ name: "C" }} }}',
        "sequence batching control tensor 'C' is specified for multiple control kinds for m",
    ),
    (
        "control_of_two_kinds",
        f'{BASE} sequence_batching {{ control_input {{ name: "C" control [ {{ int32_false_true: [0, 1] }}, '
        "{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } ] } }",
        "sequence batching control tensor 'C' is specified for multiple control kinds for m",
    ),
    (
        "two_starts",
        f'{BASE} sequence_batching {{ control_input {{ name: "C" control {{ int32_false_true: [0, 1] }} }} '
        'control_input { name: "D" control { fp32_false_true: [0, 1] } } }',
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
    ),
    (
        "no_values",
        control("kind: CONTROL_SEQUENCE_END"),
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_END for m",
    ),
    (
        "two_kinds_of_values",
        control("kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] bool_false_true: [false, true]"),
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
        "for CONTROL_SEQUENCE_READY for m",
    ),
    (
        "one_integer",
        control("kind: CONTROL_SEQUENCE_START int32_false_true: [1]"),
        "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    (
        "three_floats",
        control("kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1, 2]"),
        "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    (
        "one_boolean",
        control("kind: CONTROL_SEQUENCE_READY bool_false_true: [true]"),
        "sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_READY for m",
    ),
    (
        "id_type",
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
        "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    ),
    (
        "id_without_type",
        control("kind: CONTROL_SEQUENCE_CORRID"),
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
        "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    ),
    (
        "id_with_values",
        control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 int32_false_true: [0, 1]"),
        "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_CORRID for m",
    ),
    *(
        (
            f"utilization_{value}",
            f"{BASE} sequence_batching {{ direct {{ minimum_slot_utilization: {value} }} }}",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        )
        for value in ("1.5", "-0.5", "nan")
    ),
    (
        "preferred_zero",
        f"{BASE} sequence_batching {{ oldest {{ preferred_batch_size: 0 }} }}",
        "sequence batching preferred batch size must be positive for m",
    ),
    (
        "preferred_too_large",
        f"{BASE} sequence_batching {{ oldest {{ preferred_batch_size: 9 }} }}",
        "sequence batching preferred batch size must be <= max batch size for m",
    ),
    (
        "candidates",
        f"{BASE} sequence_batching {{ oldest {{ max_candidate_sequences: -1 }} }}",
        "sequence batching has -1 max candidate sequences, expected at least 1, or 0 for the default for m",
    ),
    (
        "batch_strategy",
        f'{BASE} sequence_batching {{ }} parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value '
        '{ string_value: "s.so" } }',
        "parameter 'TRITON_BATCH_STRATEGY_PATH' is not allowed with sequence batching for m",
    ),
]

STATES = [
    (
        "state_input",
        state('output_name: "t" data_type: TYPE_FP32 dims: 1'),
        "state 0 must specify 'input_name' for m",
    ),
    (
        "state_output",
        state('input_name: "s" data_type: TYPE_FP32 dims: 1'),
        "state 0 must specify 'output_name' for m",
    ),
    (
        "state_input_twice",
        f'{BASE} sequence_batching {{ state {{ {S} }} state {{ input_name: "s" output_name: "u" data_type: TYPE_FP32 '
        "dims: 1 } }",
        "State input name 's' specified more than once.",
    ),
    (
        "state_output_twice",
        f'{BASE} sequence_batching {{ state {{ {S} }} state {{ input_name: "r" output_name: "t" data_type: TYPE_FP32 '
        "dims: 1 } }",
        "State output name 't' specified more than once.",
    ),
    ("type", state('input_name: "s" output_name: "t" dims: 1'), "state 's' must specify 'data_type' for m"),
    (
        "dims",
        state('input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: 0'),
        "state 's' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        "size",
        state(f'input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: {2**61}'),
        f"byte size for tensor 's' exceeds maximum size of {BIG} for m",
    ),
    (
        "growable",
        state(f"{S} use_growable_memory: true"),
        "state 's' has 'use_growable_memory', which needs 'use_same_buffer_for_input_output' and instance groups of "
        "kind KIND_GPU for m",
    ),
    (
        "two_initial_states",
        state(f"{S} initial_state {{ {INITIAL} zero_data: true }} initial_state {{ {INITIAL} zero_data: true }}"),
        "initial_state field for state input 's' must contain exactly one or zero element. Found '2' elements.",
    ),
    (
        "initial_type",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_INT32 dims: [2, 3] zero_data: true }}'),
        "The data type used for 'initial_state' field of state 's' does not match the state data type.",
    ),
    (
        "initial_name",
        state(f"{S} initial_state {{ data_type: TYPE_FP32 dims: [2, 3] zero_data: true }}"),
        "Field 'name' must be set when using initial_state for state input 's'.",
    ),
    (
        "initial_rank",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_FP32 dims: [2] zero_data: true }}'),
        "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 's'. "
        "1 != 2",
    ),
    (
        "initial_dims",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_FP32 dims: [3, 3] zero_data: true }}'),
        "'initial_state' dim for input name 's' doesn't match 'state' dim description. 3 != 2",
    ),
    (
        "initial_variable",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_FP32 dims: [2, -1] zero_data: true }}'),
        "'initial_state' field for state input name 's' contains variable dimensions.",
    ),
    (
        "initial_negative",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_FP32 dims: [2, -3] zero_data: true }}'),
        "tensor 's' contains an invalid dimension in shape [2,-3]",
    ),
    (
        "initial_size",
        state(f'{S} initial_state {{ name: "i" data_type: TYPE_FP32 dims: [2, 1000000000] zero_data: true }}'),
        "initial_state for state input 's' takes 8000000000 bytes, the limit is 4294967296",
    ),
    (
        "initial_data",
        state(f"{S} initial_state {{ {INITIAL} }}"),
        "initial_state setting expects state's' to have state_data set",
    ),
]


def found(text: str) -> list[Problem]:
    """Return the problems of the config, as a load finds them."""
    config = ModelConfig()
    text_format.Parse(text, config)
    config.name = config.name or "m"
    derive(config, config.name, ("1",))
    before = config.SerializeToString(deterministic=True)
    scheduled = SequenceScheduler.check_config(config, completed=True)
    problems_found = problems(config, needs_backend=SequenceScheduler.needs_instances, scheduled=scheduled)
    assert config.SerializeToString(deterministic=True) == before
    return problems_found


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_a_good_config_passes(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "message"), [pytest.param(text, message, id=name) for name, text, message in [*SEQUENCES, *STATES]]
)
def test_a_bad_config_is_refused_with_the_broken_rule(text: str, message: str) -> None:
    problems_found = found(text)
    assert (problems_found[0].message, problems_found[0].code) == (message, Code.INVALID_ARGUMENT)
    assert {problem.message for problem in problems_found} - {message} == set()


def test_growable_states_need_every_group_on_gpus() -> None:
    state = """state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: 1
        use_same_buffer_for_input_output: true use_growable_memory: true }"""
    config = text_format.Parse(f"sequence_batching {{ {state} }} instance_group {{ kind: KIND_GPU }}", ModelConfig())
    assert list(SequenceScheduler.check_config(config, completed=True)) == []
    config.instance_group.add()
    (problem,) = SequenceScheduler.check_config(config, completed=True)
    assert problem.field == "sequence_batching.state[0].use_growable_memory"


def test_states_are_checked_after_completion_by_the_backend() -> None:
    config = text_format.Parse('sequence_batching { state { input_name: "s" output_name: "t" } }', ModelConfig())
    assert list(SequenceScheduler.check_config(config, completed=False)) == []
    (problem,) = SequenceScheduler.check_config(config, completed=True)
    assert problem.field == "sequence_batching.state[0].data_type"


#: Mistakes, and Triton 2.51's words for them; it needs no version of the model to find most.
MISTAKES = {
    "control": (
        'backend: "identity" sequence_batching { control_input { name: "S" '
        "control { kind: CONTROL_SEQUENCE_START } } }",
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for m",
    ),
    "utilization": (
        'backend: "identity" sequence_batching { direct { minimum_slot_utilization: 2 } }',
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    "state": (
        'backend: "identity" sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: 1 '
        'initial_state { name: "i" data_type: TYPE_INT8 dims: 1 zero_data: true } } }',
        "The data type used for 'initial_state' field of state 'a' does not match the state data type.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("versions", [(), (1,)])
def test_a_config_error_is_reported_before_missing_parts(
    mistake: str, versions: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, message = MISTAKES[mistake]
    (tmp_path / "m").mkdir()
    for version in versions:
        (tmp_path / "m" / str(version)).mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    with pytest.raises(HeadraceError, match="failed to load all models"), Server(tmp_path):
        pass
    assert message in caplog.text
    assert "at least one version" not in caplog.text
    assert "pip install" not in caplog.text
