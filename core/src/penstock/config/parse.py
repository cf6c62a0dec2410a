"""Reads model configs: text format, JSON, files. Errors say where, what and what was meant.

Source: behaviours.md sections 4.1 and 5.4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor

from penstock.config.model_config_pb2 import ModelConfig
from penstock.errors import ConfigError

#: No hand-written config comes near; what does is not worth parsing.
MAX_BYTES = 16 * 1024 * 1024
_MAX_DEPTH = 100

_UNKNOWN_FIELD = re.compile(r'Message type "penstock\.([\w.]+)" has no field named "(\w+)"')


def find_config(model_path: Path, config_name: str = "") -> Path | None:
    """The config file of a model: ``configs/<config_name>.pbtxt`` if it exists, else
    ``config.pbtxt``, else None (``--model-config-name``, behaviours.md section 4.1)."""
    candidates = [model_path / "configs" / f"{config_name}.pbtxt"] if config_name else []
    for path in (*candidates, model_path / "config.pbtxt"):
        if path.is_file():
            return path
    return None


def read_config(path: Path) -> ModelConfig:
    """The config in ``path``. Raises `ConfigError` with ``path:line:column``."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: config of {path.stat().st_size} bytes, the limit is {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_text(text, str(path))


def parse_text(text: str, source: str = "config") -> ModelConfig:
    """The config in protobuf text format. Raises `ConfigError` with ``source:line:column``."""
    _limit_depth(text, source)
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        place = ":".join(str(n) for n in (error.GetLine(), error.GetColumn()) if n is not None)
        reason = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ConfigError(f"{source}:{place}: {_reword(reason)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from error
    return config


def parse_json(text: str) -> ModelConfig:
    """The config in JSON, as the load API takes it; snake_case and camelCase names.

    Raises `ConfigError` with Triton's ``Invalid config override:`` prefix.
    """
    config = ModelConfig()
    try:
        json_format.Parse(text, config, max_recursion_depth=_MAX_DEPTH)
    except (json_format.ParseError, RecursionError) as error:
        raise ConfigError(f"Invalid config override: {error}") from error
    return config


def _limit_depth(text: str, source: str) -> None:
    """The parser recurses; refuse what would exhaust it, and name the line."""
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'|#.*', "", line)
        depth += sum(bare.count(mark) for mark in "{[<") - sum(bare.count(mark) for mark in "}]>")
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{source}:{number}: nested deeper than {_MAX_DEPTH} levels")


def _reword(reason: str) -> str:
    """The parser's reason, without our package name and with the nearest field that exists."""
    unknown = _UNKNOWN_FIELD.search(reason)
    if unknown is None:
        return reason.replace("penstock.", "")
    message, field = unknown.groups()
    known = [name for found in _messages(ModelConfig.DESCRIPTOR) if found.full_name == f"penstock.{message}"
             for name in found.fields_by_name]
    nearest = get_close_matches(field, known, 1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"its fields are {', '.join(sorted(known))}"
    return f"{message} has no field '{field}'; {hint}"


def _messages(root: Descriptor) -> Iterator[Descriptor]:
    """``root`` and every message type reachable from it."""
    seen: dict[str, Descriptor] = {}
    todo = [root]
    while todo:
        message = todo.pop()
        if message.full_name not in seen:
            seen[message.full_name] = message
            todo += [field.message_type for field in message.fields if field.message_type is not None]
    return iter(seen.values())
