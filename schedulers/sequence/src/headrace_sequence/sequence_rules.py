"""Rules of ``sequence_batching`` and of its implicit states (docs/spec/behaviours.md sections 4.7 and 6.5)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from headrace import ModelConfig, ModelInstanceGroup, ModelSequenceBatching, Problem, check_shape, dtypes

Control = ModelSequenceBatching.Control
State = ModelSequenceBatching.State

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = {each.config_value for each in (dtypes.UINT64, dtypes.INT64, dtypes.UINT32, dtypes.INT32, dtypes.BYTES)}
#: The largest initial state, in bytes.
_MAX_INITIAL_BYTES = 4 * 2**30
#: The size of the length in front of each element of BYTES.
_LENGTH_BYTES = 4


def check(config: ModelConfig) -> Iterator[Problem]:
    """Check the controls, then the strategy."""
    batching, suffix = config.sequence_batching, f" for {config.name}"
    yield from _check_controls(batching, config.name)
    yield from _check_oldest(batching.oldest, config)
    yield from _check_direct(batching.direct, suffix)


def _check_controls(batching: ModelSequenceBatching, model: str) -> Iterator[Problem]:
    names: set[str] = set()
    kinds: set[int] = set()
    for index, tensor in enumerate(batching.control_input):
        field = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            yield Problem(f"{field}.name", f"sequence batching control tensor must have a name for {model}")
        elif tensor.name in names or len(tensor.control) > 1:  # Triton 2.51 accepts the latter, and sets only one
            yield Problem(
                f"{field}.name",
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {model}",
            )
        names.add(tensor.name)
        for number, control in enumerate(tensor.control):
            yield from _check_control(control, f"{field}.control[{number}]", kinds, model)


def _check_control(control: Control, field: str, kinds: set[int], model: str) -> Iterator[Problem]:
    kind = Control.Kind.Name(control.kind)
    if control.kind in kinds:
        yield Problem(f"{field}.kind", f"sequence batching specifies multiple {kind} tensors for {model}")
    kinds.add(control.kind)
    values = [name for name in _VALUES if getattr(control, name)]
    if control.kind == Control.CONTROL_SEQUENCE_CORRID:
        yield from _check_id(control, field, values, f"for {kind} for {model}", model)
    else:
        yield from _check_flag(control, field, values, f"for {kind} for {model}")


def _check_id(control: Control, field: str, values: list[str], place: str, model: str) -> Iterator[Problem]:
    if values:
        yield Problem(
            f"{field}.{values[0]}",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            + place,
        )
    if control.data_type not in _ID_TYPES:
        yield Problem(
            f"{field}.data_type",
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {model}. Allowed data types are "
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        )


def _check_flag(control: Control, field: str, values: list[str], place: str) -> Iterator[Problem]:
    if not values:
        yield Problem(
            field,
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' " + place,
        )
    elif len(values) > 1:
        yield Problem(
            field,
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' {place}",
        )
    elif len(getattr(control, values[0])) != 2:
        yield Problem(
            f"{field}.{values[0]}", f"sequence batching control '{values[0]}' must have exactly 2 entries {place}"
        )


def _check_oldest(oldest: ModelSequenceBatching.StrategyOldest, config: ModelConfig) -> Iterator[Problem]:
    field = "sequence_batching.oldest"
    if oldest.max_candidate_sequences < 0:
        yield Problem(
            f"{field}.max_candidate_sequences",
            f"sequence batching has {oldest.max_candidate_sequences} max candidate sequences, expected at least 1, or "
            f"0 for the default for {config.name}",
        )
    for index, size in enumerate(oldest.preferred_batch_size):
        part, title = f"{field}.preferred_batch_size[{index}]", "sequence batching preferred batch size"
        if size <= 0:
            yield Problem(part, f"{title} must be positive for {config.name}")
        elif size > config.max_batch_size:
            yield Problem(part, f"{title} must be <= max batch size for {config.name}")


def _check_direct(direct: ModelSequenceBatching.StrategyDirect, suffix: str) -> Iterator[Problem]:
    field = "sequence_batching.direct"
    if not 0 <= direct.minimum_slot_utilization <= 1:
        yield Problem(
            f"{field}.minimum_slot_utilization",
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0]{suffix}",
        )


def check_states(config: ModelConfig) -> Iterator[Problem]:
    """Check the names, types, shapes, memory and initial value of every state."""
    names: set[tuple[str, str]] = set()
    for index, state in enumerate(config.sequence_batching.state):
        field = f"sequence_batching.state[{index}]"
        for side, name in (("input", state.input_name), ("output", state.output_name)):
            if not name:
                yield Problem(f"{field}.{side}_name", f"state {index} must specify '{side}_name' for {config.name}")
            elif (side, name) in names:
                yield Problem(f"{field}.{side}_name", f"State {side} name '{name}' specified more than once.")
            names.add((side, name))
        yield from _check_tensor(state, field, config.name)
        yield from _check_memory(state, field, config)
        yield from _check_initial(state, field)


def _check_tensor(state: State, field: str, model: str) -> Iterator[Problem]:
    title, suffix = f"state '{state.input_name}'", f" for {model}"
    if not state.data_type:
        yield Problem(f"{field}.data_type", f"{title} must specify 'data_type'{suffix}")
    if any(dim < 1 and dim != -1 for dim in state.dims):
        yield Problem(
            f"{field}.dims",
            f"{title} dimension must be integer >= 1, or -1 to indicate a variable-size dimension{suffix}",
        )
    else:
        yield from check_shape(f"{field}.dims", state.input_name, state.dims, state.data_type, suffix)


def _check_memory(state: State, field: str, config: ModelConfig) -> Iterator[Problem]:
    """Check ``use_growable_memory``: only the virtual memory of a GPU can grow in place."""
    if not state.use_growable_memory:
        return
    on_gpus = all(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if not state.use_same_buffer_for_input_output or not config.instance_group or not on_gpus:
        yield Problem(
            f"{field}.use_growable_memory",
            f"state '{state.input_name}' has 'use_growable_memory', which needs 'use_same_buffer_for_input_output' and "
            f"instance groups of kind KIND_GPU for {config.name}",
        )


def _check_initial(state: State, field: str) -> Iterator[Problem]:
    field, name = f"{field}.initial_state", state.input_name
    if len(state.initial_state) > 1:
        yield Problem(
            field,
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found "
            f"'{len(state.initial_state)}' elements.",
        )
    for index, initial in enumerate(state.initial_state[:1]):
        yield from _check_value(initial, state, f"{field}[{index}]")


def _check_value(initial: ModelSequenceBatching.InitialState, state: State, field: str) -> Iterator[Problem]:
    name = state.input_name
    if initial.data_type != state.data_type:
        yield Problem(
            f"{field}.data_type",
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type.",
        )
    if not initial.name:
        yield Problem(f"{field}.name", f"Field 'name' must be set when using initial_state for state input '{name}'.")
    wrong = list(_check_dims(initial, state, f"{field}.dims"))
    yield from wrong
    if not wrong and initial.data_type and (size := _size_in_bytes(initial)) > _MAX_INITIAL_BYTES:
        yield Problem(
            f"{field}.dims",
            f"initial_state for state input '{name}' takes {size} bytes, the limit is {_MAX_INITIAL_BYTES}",
        )
    if initial.WhichOneof("state_data") is None:  # Triton's text lacks the space, too
        yield Problem(field, f"initial_state setting expects state'{name}' to have state_data set")


def _size_in_bytes(initial: ModelSequenceBatching.InitialState) -> int:
    return prod(initial.dims) * (dtypes.BY_CONFIG_VALUE[initial.data_type].itemsize or _LENGTH_BYTES)


def _check_dims(initial: ModelSequenceBatching.InitialState, state: State, field: str) -> Iterator[Problem]:
    name = state.input_name
    if len(initial.dims) != len(state.dims):
        yield Problem(
            field,
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}",
        )
        return
    for ours, theirs in zip(initial.dims, state.dims, strict=True):
        if ours == -1:
            yield Problem(field, f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        elif theirs not in (-1, ours):
            yield Problem(
                field,
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{ours} != {theirs}",
            )
        elif ours < 0:
            shape = ",".join(map(str, initial.dims))
            yield Problem(field, f"tensor '{name}' contains an invalid dimension in shape [{shape}]")
