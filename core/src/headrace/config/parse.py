"""Reads model configs: text format, JSON, files. Errors say where, what and what was meant.

Source: docs/spec/behaviours.md sections 4.1 and 5.4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.config import wording
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import ConfigError

#: No hand-written config comes near; what does is not worth parsing.
MAX_BYTES = 4 * 1024 * 1024


def find_config(model_path: Path, config_name: str = "") -> Path | None:
    """The config file of a model: ``configs/<config_name>.pbtxt`` if it exists, else
    ``config.pbtxt``, else None (``--model-config-name``, docs/spec/behaviours.md section 4.1).

    Raises `ConfigError` for a name that leaves ``configs``.
    """
    if config_name in (".", "..") or "/" in config_name or "\0" in config_name:
        raise ConfigError(f"model config name '{config_name}' must be a file name without directories")
    candidates = [model_path / "configs" / f"{config_name}.pbtxt"] if config_name else []
    for path in (*candidates, model_path / "config.pbtxt"):
        if path.is_file():
            return path
    return None


def read_config(path: Path) -> ModelConfig:
    """The config in ``path``. Raises `ConfigError` that starts with ``path``, and ``:line:column``
    for what stands in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, the limit of a config")
    return parse_text(text, str(path))


def parse_text(text: str, source: str = "config") -> ModelConfig:
    """The config in protobuf text format. Raises `ConfigError` with ``source:line:column: field:``."""
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        line, column, field, reason = wording.explain_text(error, text, ModelConfig.DESCRIPTOR)
        message = f"{source}:{line}:{column}: {f'{field}: ' if field else ''}{reason}"
        raise ConfigError(message, field=field, line=line, column=column) from error
    return config


def parse_json(text: str) -> ModelConfig:
    """The config in JSON, as the load API takes it: snake_case or camelCase names, enums in any case.

    Raises `ConfigError` with Triton's ``Invalid config override:`` prefix.
    """
    if len(text) > MAX_BYTES:
        raise _refuse(f"{len(text)} characters, the limit is {MAX_BYTES}")
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _refuse(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _refuse(f"expected a JSON object, found {type(values).__name__}")
    config = ModelConfig()
    try:
        json_format.ParseDict(_fold_message(values, ModelConfig.DESCRIPTOR, ""), config)
    except json_format.ParseError as error:
        raise _refuse(wording.shorten(str(error))) from error
    return config


def _refuse(reason: str) -> ConfigError:
    return ConfigError(f"Invalid config override: {reason}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"'{key}' is given more than once")
        found[key] = value
    return found


def _fold_message(values: Any, message: Descriptor, path: str) -> Any:
    """``values`` with the names of enum values in upper case, as they are in the schema."""
    if not isinstance(values, dict):
        return values
    folded = {}
    for key, value in values.items():
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        if field is None:
            place = f"{path}: " if path else ""
            raise _refuse(place + wording.unknown_field(message, key))
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
    return value.upper() if field.enum_type is not None and isinstance(value, str) else value
