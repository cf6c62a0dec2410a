"""Rules of ``sequence_batching`` without its states (docs/spec/behaviours.md section 4.7)."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.model_config_pb2 import (
    TYPE_INT32,
    TYPE_INT64,
    TYPE_STRING,
    TYPE_UINT32,
    TYPE_UINT64,
    ModelConfig,
    ModelSequenceBatching,
)
from headrace.config.validation.dynamic_batching import check_preferred_sizes
from headrace.config.validation.numbers import check_duration
from headrace.config.validation.problem import Problem

Control = ModelSequenceBatching.Control

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = (TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING)


def check(config: ModelConfig) -> Iterator[Problem]:
    """Controls, then the strategy."""
    batching, suffix = config.sequence_batching, f" for {config.name}"
    yield from _check_controls(batching, config.name)
    field = "sequence_batching.max_sequence_idle_microseconds"
    yield from check_duration(field, batching.max_sequence_idle_microseconds, suffix)
    yield from _check_oldest(batching.oldest, config)
    yield from _check_direct(batching.direct, suffix)


def _check_controls(batching: ModelSequenceBatching, model: str) -> Iterator[Problem]:
    names: set[str] = set()
    kinds: set[int] = set()
    for index, tensor in enumerate(batching.control_input):
        field = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            yield Problem(f"{field}.name", f"sequence batching control tensor must have a name for {model}")
        elif tensor.name in names:
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
    given = [name for name in _VALUES if getattr(control, name)]
    if control.kind == Control.CONTROL_SEQUENCE_CORRID:
        yield from _check_id(control, field, given, f"for {kind} for {model}", model)
    else:
        yield from _check_flag(control, field, given, f"for {kind} for {model}")


def _check_id(control: Control, field: str, given: list[str], place: str, model: str) -> Iterator[Problem]:
    if given:
        yield Problem(
            f"{field}.{given[0]}",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            + place,
        )
    if control.data_type not in _ID_TYPES:
        yield Problem(
            f"{field}.data_type",
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {model}. Allowed data types are "
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        )


def _check_flag(control: Control, field: str, given: list[str], place: str) -> Iterator[Problem]:
    if not given:
        yield Problem(
            field,
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' " + place,
        )
    elif len(given) > 1:
        yield Problem(
            field,
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' {place}",
        )
    elif len(getattr(control, given[0])) != 2:
        yield Problem(
            f"{field}.{given[0]}", f"sequence batching control '{given[0]}' must have exactly 2 entries {place}"
        )


def _check_oldest(oldest: ModelSequenceBatching.StrategyOldest, config: ModelConfig) -> Iterator[Problem]:
    field = "sequence_batching.oldest"
    if oldest.max_candidate_sequences < 0:
        yield Problem(
            f"{field}.max_candidate_sequences",
            f"sequence batching has {oldest.max_candidate_sequences} max candidate sequences, expected at least 1, or "
            f"0 for the default for {config.name}",
        )
    yield from check_preferred_sizes(
        f"{field}.preferred_batch_size",
        "sequence batching preferred batch size",
        oldest.preferred_batch_size,
        config,
    )
    delay = oldest.max_queue_delay_microseconds
    yield from check_duration(f"{field}.max_queue_delay_microseconds", delay, f" for {config.name}")


def _check_direct(direct: ModelSequenceBatching.StrategyDirect, suffix: str) -> Iterator[Problem]:
    field = "sequence_batching.direct"
    if not 0 <= direct.minimum_slot_utilization <= 1:
        yield Problem(
            f"{field}.minimum_slot_utilization",
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0]{suffix}",
        )
    delay = direct.max_queue_delay_microseconds
    yield from check_duration(f"{field}.max_queue_delay_microseconds", delay, suffix)
