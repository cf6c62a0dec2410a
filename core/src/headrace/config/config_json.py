"""A config in JSON: the input of the load API, and the output of the ``/config`` endpoint.

Source: docs/spec/behaviours.md sections 1.6, 4.1 and 5.4. The output is protobuf's JSON with the field names of the
schema and all defaults. Protobuf's JSON writes int64 values as strings; the fields in `_NUMBERS` become numbers again,
as in Triton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import MAX_BYTES, shorten, unknown_field
from headrace.errors import ConfigError

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


#: Matches what protobuf's parser accepts beside JSON (names, single quotes, trailing commas), and tokens that look like
#: it. No ``\\s*`` is followed by a pattern that could make it backtrack, so the time is linear in the text.
_LENIENT = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"?)
    | '(?P<single>(?:[^'\\]|\\.)*)'?
    | (?P<name>[A-Za-z_$][\w$]*)(?P<colon>\s*:)?
    | (?P<missing>[{[,]\s*,)
    | (?P<trailing>,)(?=\s*[]}])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_WORDS = frozenset(("true", "false", "null"))


def parse_json(text: str) -> ModelConfig:
    """Parse the JSON config of a load request. Field names may be snake_case or camelCase, enum values in any case.

    As in Triton, names need no quotes, strings may be in single quotes, and a comma may follow the last value. Raises
    `ConfigError` with Triton's ``Invalid config override:`` prefix.
    """
    if len(text) > MAX_BYTES:
        raise _refuse(f"{len(text)} characters, the limit is {MAX_BYTES}")
    try:
        values = _load(text)
    except (ValueError, RecursionError) as error:
        try:
            values = _load(_LENIENT.sub(_strict, text))
        except (ValueError, RecursionError):
            raise _refuse(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _refuse(f"expected a JSON object, found {type(values).__name__}")
    config = ModelConfig()
    try:
        json_format.ParseDict(_fold_message(values, ModelConfig.DESCRIPTOR, ""), config)
    except json_format.ParseError as error:
        raise _refuse(shorten(str(error))) from error
    return config


def _load(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates, strict=False)


def _strict(token: re.Match[str]) -> str:
    """Return ``token`` as strict JSON."""
    if token["single"] is not None:
        inner = re.sub(r"\\.|\"", lambda part: _SINGLE.get(part[0], part[0]), token["single"], flags=re.DOTALL)
        return f'"{inner}"'
    if token["colon"] and token["name"] not in _WORDS:
        return f'"{token["name"]}"{token["colon"]}'
    return "" if token["trailing"] else token[0]


#: The replacements inside a string whose single quotes become double quotes.
_SINGLE = {"\\'": "'", '"': '\\"'}


def _refuse(reason: str) -> ConfigError:
    return ConfigError(f"Invalid config override: {reason}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"'{key}' is given more than once")
        fields[key] = value
    return fields


def _fold_message(values: Any, message: Descriptor, path: str) -> Any:
    """Return ``values`` with enum values in upper case, as in the schema, and "true" and "false" as bools."""
    if not isinstance(values, dict):
        return values
    folded = {}
    for key, value in values.items():
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        if field is None:
            place = f"{path}: " if path else ""
            raise _refuse(place + unknown_field(message, key))
        folded[key] = _fold_field(value, field, f"{path}.{key}" if path else key)
    return folded


def _fold_field(value: Any, field: FieldDescriptor, path: str) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        inner = message.fields_by_name["value"]
        if not isinstance(value, dict):
            return value
        return {key: _fold_field(item, inner, f'{path}["{key}"]') for key, item in value.items()}
    if isinstance(value, list):
        return [_fold_one(item, field, f"{path}[{index}]") for index, item in enumerate(value)]
    return _fold_one(value, field, path)


def _fold_one(value: Any, field: FieldDescriptor, path: str) -> Any:
    if field.message_type is not None:
        return _fold_message(value, field.message_type, path)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and value in ("true", "false"):
        return value == "true"
    return value.upper() if field.enum_type is not None and isinstance(value, str) else value


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return ``config`` as plain values that any JSON writer accepts."""
    values: dict[str, Any] = json_format.MessageToDict(
        config, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
    )
    for path in _NUMBERS:
        *parents, name = path.split(".")
        for parent in _walk(values, parents):
            if isinstance(parent, dict) and name in parent:
                parent[name] = _number(parent[name])
    return values


def _walk(node: Any, path: list[str]) -> Iterator[Any]:
    """Yield every value at ``path``."""
    if not path:
        yield node
    elif path[0] == "*":
        for child in node.values() if isinstance(node, dict) else node:
            yield from _walk(child, path[1:])
    elif isinstance(node, dict) and path[0] in node:
        yield from _walk(node[path[0]], path[1:])


def _number(value: Any) -> Any:
    return [int(item) for item in value] if isinstance(value, list) else int(value)
