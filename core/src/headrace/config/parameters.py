"""Reads the ``parameters`` map of a config: into a backend's ``Parameters``, and the keys of core.

The key of a field is its name, or ``metadata={"key": ...}``. A field of type ``dict[str, str]`` with
``metadata={"prefix": "session."}`` gets every key with that prefix, under its full name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache, partial
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from headrace.config.model_config_pb2 import ModelParameter
from headrace.config.padding import PADDING
from headrace.config.parse import clip
from headrace.config.validation.shared import Problem
from headrace.errors import ConfigError, PluginError

T = TypeVar("T")
#: If instances run on the event loop; ``auto``: if their executions are short.
OnLoop: TypeAlias = Literal["on", "off", "auto"]

#: The key for the place where the instances of a model run, for all backends: the name of a kind of executor.
ISOLATION = "isolation"
#: A thread of the server, and a process per instance. Plugins may have other kinds.
THREAD, PROCESS = "thread", "process"
#: The key that limits the memory of each process of a model.
MEMORY_LIMIT = "memory_limit_bytes"
#: The key for how long a process of a model, and the server for its sake, poll for a message before they sleep. At most
#: 1 s: a process that polls for longer keeps its core from all others.
BUSY_POLL = "busy_poll_microseconds"
#: The key that limits the time to load a version of a model.
LOAD_TIMEOUT = "load_timeout_seconds"
#: The key for the first pause of an instance whose process dies too often.
RESTART_PAUSE = "restart_pause_seconds"
#: The key for running the instances of a model on the server's event loop.
EVENT_LOOP = "event_loop"
#: The key that names the scheduler, also one that has no field in the config. The keys of the scheduler's own
#: parameters start with `SCHEDULER_PREFIX`.
SCHEDULER = "scheduler"
SCHEDULER_PREFIX = "scheduler."
#: The keys of the parameters of a plugin's control mode start so.
CONTROL_PREFIX = "control."

_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
#: Keys that have a meaning with every backend, beside those that extensions read.
CORE_KEYS = {ISOLATION, MEMORY_LIMIT, BUSY_POLL, RESTART_PAUSE, LOAD_TIMEOUT, EVENT_LOOP, SCHEDULER, PADDING, _STRATEGY}


def parse_parameters(cls: type[T], parameters: Mapping[str, ModelParameter]) -> T:
    """Return an instance of the dataclass ``cls``. Its fields may be str, int, float, bool, or one of these or None.

    Keys without a field are ignored (`unknown` lists them). Raises `ConfigError` for a value of another type than its
    field's and for a `ValueError` of the class itself, and `PluginError` for a field of any other type.
    """
    values, wrong, _ = _read(cls, parameters)
    for problem in wrong:
        raise ConfigError(problem.message, field=problem.field)
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"parameters: {error}", field="parameters") from error


def read_isolation(parameters: Mapping[str, ModelParameter]) -> str | None:
    """Return the parameter ``isolation``, the name of a kind of executor, or None: the backend decides."""
    return parameters[ISOLATION].string_value if ISOLATION in parameters else None


def read_memory_limit(parameters: Mapping[str, ModelParameter]) -> int:
    """Return the parameter ``memory_limit_bytes``; 0 is no limit. Raises `ConfigError`."""
    return _whole(parameters, MEMORY_LIMIT, range(1, 1 << 63), 0, "a number of bytes above 0")


def read_busy_poll(parameters: Mapping[str, ModelParameter], default: int) -> int:
    """Return the parameter ``busy_poll_microseconds``, or ``default``. Raises `ConfigError`."""
    return _whole(parameters, BUSY_POLL, range(1_000_001), default, "a number of microseconds from 0 to 1000000")


def read_load_timeout(parameters: Mapping[str, ModelParameter]) -> int:
    """Return the parameter ``load_timeout_seconds``, 0 if it is absent. Raises `ConfigError`."""
    return _whole(parameters, LOAD_TIMEOUT, range(1, 1 << 31), 0, "a number of seconds above 0")


def read_restart_pause(parameters: Mapping[str, ModelParameter], default: int) -> int:
    """Return the parameter ``restart_pause_seconds``, or ``default``. Raises `ConfigError`."""
    return _whole(parameters, RESTART_PAUSE, range(1, 86_401), default, "a number of seconds from 1 to 86400")


def read_event_loop(parameters: Mapping[str, ModelParameter]) -> OnLoop:
    """Return the parameter ``event_loop``, ``auto`` if it is absent. Raises `ConfigError`."""
    text = parameters[EVENT_LOOP].string_value if EVENT_LOOP in parameters else "auto"
    if text in get_args(OnLoop):
        return cast("OnLoop", text)
    expected = "'on', 'off' or 'auto'"
    raise ConfigError(f"parameter '{EVENT_LOOP}' is '{clip(text)}', expected {expected}", field=_path(EVENT_LOOP))


def _whole(parameters: Mapping[str, ModelParameter], key: str, allowed: range, default: int, expected: str) -> int:
    if key not in parameters:
        return default
    text = parameters[key].string_value
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) in allowed:
        return int(text)
    raise ConfigError(f"parameter '{key}' is '{clip(text)}', expected {expected}", field=_path(key))


def check(cls: type, parameters: Mapping[str, ModelParameter]) -> list[Problem]:
    """Return every problem for which the functions above raise `ConfigError`. Raises `PluginError` as they do."""
    wrong: list[Problem] = []
    ours = (read_memory_limit, partial(read_busy_poll, default=0), partial(read_restart_pause, default=1))
    for read in (*ours, read_load_timeout, read_event_loop):
        try:
            read(parameters)
        except ConfigError as error:
            wrong.append(Problem(error.field, error.message))
    try:
        parse_parameters(cls, parameters)
    except ConfigError as error:
        wrong += _read(cls, parameters)[1] or [Problem(error.field, error.message, error.code)]
    return wrong


def unknown(cls: type, parameters: Mapping[str, ModelParameter], others: Collection[str] = ()) -> list[Problem]:
    """Return a problem for each key that neither core, ``cls`` nor extensions (``others``) read, with all valid keys.
    Return none for a class without fields: its backend reads the config itself."""
    return _read(cls, {key: value for key, value in parameters.items() if key not in others})[2]


def _read(cls: type, parameters: Mapping[str, ModelParameter]) -> tuple[dict[str, Any], list[Problem], list[Problem]]:
    """Return the values of the fields of ``cls``, a problem for each wrong value, and one for each unknown key. All are
    in the order of the keys."""
    keys, families = _layout(cls)
    if not (keys or families):
        return {}, [], []
    values: dict[str, Any] = {}
    wrong: list[Problem] = []
    unread: list[Problem] = []
    for key in sorted(parameters):
        text = parameters[key].string_value
        prefix = next((prefix for prefix in families if key.startswith(prefix)), None)
        if key in keys:
            try:
                name, convert = keys[key]
                values[name] = convert(text)
            except ValueError as error:
                wrong.append(Problem(_path(key), f"parameter '{key}' is '{clip(text)}', {error}"))
        elif prefix is not None:
            values.setdefault(families[prefix], {})[key] = text
        elif key not in CORE_KEYS and not key.startswith((SCHEDULER_PREFIX, CONTROL_PREFIX)):
            unread.append(Problem(_path(key), _unknown(key, [*keys, *(f"{prefix}*" for prefix in families)])))
    return values, wrong, unread


@lru_cache(maxsize=64)  # a class is read several times per load
def _layout(cls: type) -> tuple[dict[str, tuple[str, Callable[[str], Any]]], dict[str, str]]:
    """Return the name and the converter of each field by its key, and the names of fields by their prefix."""
    hints = get_type_hints(cls)
    declared = fields(cls)
    families = {field.metadata["prefix"]: field.name for field in declared if "prefix" in field.metadata}
    keys = {
        field.metadata.get("key", field.name): (field.name, _converter(cls, field.name, hints[field.name]))
        for field in declared
        if "prefix" not in field.metadata
    }
    return keys, families


def _path(key: str) -> str:
    return f"parameters[{key!r}]"


def _converter(cls: type, name: str, hint: Any) -> Callable[[str], Any]:
    """Return a function that parses the text of field ``name``. It raises `ValueError` with the expected form."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in choices if kind is not type(None)]
    if len(kinds) != 1 or kinds[0] not in _CONVERTERS:
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}.{name} is {hint}, expected str, int, float or bool")

    def convert(text: str) -> Any:
        parse, expected = _CONVERTERS[kinds[0]]
        try:
            return parse(text)
        except ValueError:
            raise ValueError(f"expected {expected}") from None

    return convert


def _boolean(text: str) -> bool:
    folded = text.strip().lower()
    if folded in ("true", "on", "yes", "1"):
        return True
    if folded in ("false", "off", "no", "0"):
        return False
    raise ValueError(text)


_CONVERTERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_boolean, "true or false"),
}


def _unknown(key: str, known: list[str]) -> str:
    nearest = get_close_matches(clip(key), known, 1)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"unknown parameter '{clip(key)}'; {hint}known: {', '.join(sorted(known))}"
