"""A config as the ``/config`` endpoint shows it (docs/spec/behaviours.md section 1.6).

Protobuf's JSON with field names as in the schema and all defaults printed; int64 values, which
protobuf's JSON writes as strings, become numbers in the places where Triton turns them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict

from headrace.config.model_config_pb2 import ModelConfig

#: Paths of int64 fields that are printed as numbers; ``*`` is every element or every key.
_NUMBERS = (
    "input.*.dims",
    "input.*.reshape.shape",
    "output.*.dims",
    "output.*.reshape.shape",
    "version_policy.specific.versions",
    "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.priority_levels",
    "dynamic_batching.default_priority_level",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "dynamic_batching.priority_queue_policy.*.default_timeout_microseconds",
    "sequence_batching.max_sequence_idle_microseconds",
    "sequence_batching.direct.max_queue_delay_microseconds",
    "sequence_batching.oldest.max_queue_delay_microseconds",
    "sequence_batching.state.*.dims",
    "ensemble_scheduling.step.*.model_version",
    "model_warmup.*.inputs.*.dims",
)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """``config`` as plain JSON values, ready for any JSON writer."""
    form: dict[str, Any] = MessageToDict(
        config, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
    )
    for path in _NUMBERS:
        *parents, name = path.split(".")
        for parent in _walk(form, parents):
            if isinstance(parent, dict) and name in parent:
                parent[name] = _number(parent[name])
    return form


def _walk(node: Any, path: list[str]) -> Iterator[Any]:
    """Every value that ``path`` leads to."""
    if not path:
        yield node
    elif path[0] == "*":
        for child in node.values() if isinstance(node, dict) else node:
            yield from _walk(child, path[1:])
    elif isinstance(node, dict) and path[0] in node:
        yield from _walk(node[path[0]], path[1:])


def _number(value: Any) -> Any:
    return [int(item) for item in value] if isinstance(value, list) else int(value)
