"""A backend's ``Parameters`` from the ``parameters`` map of a config.

A field's key is its name, or ``metadata={"key": ...}``. A field of type ``dict[str, str]`` with
``metadata={"prefix": "session."}`` takes every key that begins so, under its full name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from penstock.config.model_config_pb2 import ModelParameter
from penstock.errors import ConfigError

T = TypeVar("T")

#: Keys that core understands for every backend.
CORE_KEYS = frozenset(("TRITON_BATCH_STRATEGY_PATH",))


def parse_parameters(cls: type[T], given: Mapping[str, ModelParameter]) -> T:
    """An instance of the dataclass ``cls``; its fields may be str, int, float, bool, or X | None.

    A class without fields takes any key and reads none. Raises `ConfigError` for an unknown key,
    listing the known ones, and for a value that is not of its field's type.
    """
    declared = fields(cls)  # type: ignore[arg-type]
    if not declared:
        return cls()
    keys = {field.metadata.get("key", field.name): field for field in declared if "prefix" not in field.metadata}
    families = {field.metadata["prefix"]: field for field in declared if "prefix" in field.metadata}
    values: dict[str, Any] = {}
    for key in sorted(given):
        text = given[key].string_value
        prefix = next((prefix for prefix in families if key.startswith(prefix)), None)
        if key in keys:
            values[keys[key].name] = _convert(key, text, keys[key])
        elif prefix is not None:
            values.setdefault(families[prefix].name, {})[key] = text
        elif key not in CORE_KEYS:
            raise ConfigError(_unknown(key, [*keys, *(f"{prefix}*" for prefix in families)]))
    return cls(**values)


def _convert(key: str, text: str, field: Field[Any]) -> Any:
    kind = str(field.type).removesuffix(" | None")
    try:
        return _CONVERTERS[kind](text.strip())
    except ValueError:
        raise ConfigError(f"parameter '{key}' is '{text}', expected {_EXPECTED[kind]}") from None


def _boolean(text: str) -> bool:
    folded = text.lower()
    if folded in ("true", "on", "yes", "1"):
        return True
    if folded in ("false", "off", "no", "0"):
        return False
    raise ValueError(text)


#: By the annotation as written: parameter modules use ``from __future__ import annotations``.
_CONVERTERS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": _boolean}
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _unknown(key: str, known: list[str]) -> str:
    nearest = get_close_matches(key, known, 1)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"unknown parameter '{key}'; {hint}known: {', '.join(sorted(known))}"
