"""The sampling parameters of a request: the JSON object ``sampling_parameters``, with vLLM's names."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import orjson

from headrace import InvalidArgument, one_line

#: The longest JSON of sampling parameters: parsing it holds the interpreter's lock.
MAX_SAMPLING_BYTES = 1 << 20
#: A JSON schema or a grammar is compiled by the engine: a large or deep one would delay all other requests.
MAX_CONSTRAINT_BYTES, MAX_CONSTRAINT_DEPTH = 64 << 10, 64
MAX_CHOICES = 4096
MAX_STOPS, MAX_STOP_BYTES, MAX_LOGPROBS, MAX_BIASES = 16, 1024, 20, 1024
#: The members of ``structured_outputs``; ``guided_decoding`` is its older name.
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request. Defaults are for requests without the member; None is the engine's own
    default.

    ``structured`` has at most one member, of `CONSTRAINTS`: the text must match it. Its ``json`` is a schema, an object
    or true, also if the caller sent it as a string. ``more`` are the members that are none of the others, for engines
    with further ones. An engine must refuse those that it does not have.
    """

    max_tokens: int | None = None  #: None: until the model ends, or its context is full
    min_tokens: int = 0
    temperature: float | None = None  #: 0: the most likely token, always
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  #: the number of reported alternatives per token; None: no log probabilities
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    structured: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    lora_name: str = ""
    more: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def read_sampling(text: bytes) -> Sampling:
    """Return the sampling parameters in the JSON object ``text``.

    Raises `InvalidArgument` with the member, its value and the rule.
    """
    if len(text) > MAX_SAMPLING_BYTES:
        raise InvalidArgument(f"sampling_parameters has {len(text)} bytes, the limit is {MAX_SAMPLING_BYTES}")
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"sampling_parameters is not JSON: {error}") from None
    if type(document) is not dict:
        raise InvalidArgument(f"sampling_parameters must be a JSON object, got {_kind(document)}")
    return sampling_of(document)


def sampling_of(members: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters in ``members``, which are JSON values. A string of a number counts as the number.

    Raises as `read_sampling`.
    """
    known: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for name, value in members.items():
        if value is None:
            continue
        name = _ALIASES.get(name, name)
        if name in _INTEGERS:
            known[name] = whole_number(name, value, *_INTEGERS[name])
        elif name in _FLOATS:
            known[name] = _number(name, value, *_FLOATS[name])
        elif name in _READERS:
            known[name] = _READERS[name](name, value)
        elif name in ("structured_outputs", "guided_decoding"):
            known["structured"] = _constraint(name, value)
        elif name == "n":
            whole_number(name, value, 1, 1)
        else:
            more[name] = value
    if known.get("min_tokens", 0) > known.get("max_tokens", 2**31):
        least, most = known["min_tokens"], known["max_tokens"]
        raise InvalidArgument(f"min_tokens must be at most max_tokens, {most}, got {least}")
    return Sampling(**known, more=more)


#: Members that are whole numbers, with the least and the most.
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
_FLOATS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 100.0),
}
_ALIASES: Mapping[str, str] = {"max_completion_tokens": "max_tokens", "stop_words": "stop"}


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """Return ``value`` as a whole number from ``least`` to ``most``. Raises `InvalidArgument`."""
    if type(value) is str and value.removeprefix("-").isdecimal() and len(value) < 24:
        value = int(value)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from {least} to {most}, got {shown(value)}")
    return value


def _number(name: str, value: Any, least: float, most: float) -> float:
    if type(value) is str:
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) not in (int, float) or not least <= value <= most:  # also for NaN
        raise InvalidArgument(f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}")
    return float(value)


def _boolean(name: str, value: Any) -> bool:
    value = {"true": True, "false": False}.get(value, value) if type(value) is str else value
    if type(value) is not bool:
        raise InvalidArgument(f"{name} must be true or false, got {shown(value)}")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if type(value) is str else value
    if type(stops) is not list or not all(type(each) is str and each for each in stops):
        raise InvalidArgument(f"{name} must be a string or an array of strings, none empty, got {shown(value)}")
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(f"{name} has {len(stops)} strings, the limit is {MAX_STOPS}")
    for each in stops:
        if len(_string(name, each).encode()) > MAX_STOP_BYTES:
            raise InvalidArgument(f"{name} has a string of more than {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _biases(name: str, value: Any) -> Mapping[int, float]:
    if type(value) is not dict:
        raise InvalidArgument(f"{name} must be an object of tokens and numbers, got {shown(value)}")
    if len(value) > MAX_BIASES:
        raise InvalidArgument(f"{name} has {len(value)} members, the limit is {MAX_BIASES}")
    return {whole_number(f"a token of {name}", token, 0, 2**31 - 1): _number(name, bias, -100, 100)
            for token, bias in value.items()}  # fmt: skip


def _constraint(name: str, value: Any) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise InvalidArgument(f"{name} must be a JSON object, got {shown(value)}")
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    if unknown := [key for key in given if key not in CONSTRAINTS]:
        raise InvalidArgument(
            f"{name} has the member '{one_line(unknown[0])}', expected one of {', '.join(CONSTRAINTS)}"
        )
    if len(given) > 1:
        raise InvalidArgument(f"{name} must have one constraint, got {', '.join(given)}")
    return {key: _checked_constraint(f"{name}.{key}", key, each) for key, each in given.items()}


def _checked_constraint(name: str, kind: str, value: Any) -> Any:
    """Return the constraint ``value``, of a ``kind`` of `CONSTRAINTS`."""
    given = value
    if kind == "json" and type(value) is str and len(value) <= MAX_CONSTRAINT_BYTES:
        with contextlib.suppress(ValueError):
            value = orjson.loads(value)
    expected = {"json": (dict, bool), "json_object": (bool,), "choice": (list,)}.get(kind, (str,))
    if type(value) not in expected or (kind == "choice" and not value):
        what = {"json": "a JSON schema", "json_object": "true", "choice": "an array of strings, not empty"}
        raise InvalidArgument(f"{name} must be {what.get(kind, 'a string')}, got {shown(given)}")
    if (depth := depth_of(value)) > MAX_CONSTRAINT_DEPTH:
        raise InvalidArgument(f"{name} is nested {depth} levels deep, the limit is {MAX_CONSTRAINT_DEPTH}")
    if kind == "choice" and len(value) > MAX_CHOICES:
        raise InvalidArgument(f"{name} has {len(value)} strings, the limit is {MAX_CHOICES}")
    for each in value if kind == "choice" else [value] if kind in ("regex", "grammar") else []:
        _string(name if kind != "choice" else f"a member of {name}", each)
    if (size := len(orjson.dumps(value))) > MAX_CONSTRAINT_BYTES:
        raise InvalidArgument(f"{name} has {size} bytes, the limit is {MAX_CONSTRAINT_BYTES}")
    return value


def depth_of(value: Any) -> int:
    """Return the depth of the nested arrays and objects of ``value``. No recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if type(each) in (dict, list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if type(each) is dict else each)]
    return depth


def _string(name: str, value: Any) -> str:
    if type(value) is not str:
        raise InvalidArgument(f"{name} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # from a program: JSON and gRPC cannot have it
        raise InvalidArgument(f"{name} has half of a surrogate pair at {error.start}") from None
    return value


_READERS: Mapping[str, Any] = {
    "stop": _stops,
    "ignore_eos": _boolean,
    "logit_bias": _biases,
    "lora_name": _string,
}
#: The members that `sampling_of` reads.
SAMPLING_MEMBERS = frozenset((*_INTEGERS, *_FLOATS, *_READERS, *_ALIASES, "structured_outputs", "guided_decoding", "n"))
assert {*_INTEGERS, *_FLOATS, *_READERS, "structured", "more"} == {each.name for each in fields(Sampling)}


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Return ``value`` for an error: one line of at most 100 characters. A large value takes no longer."""
    if isinstance(value, dict | list) and len(value) > 20:
        return f"{'an array' if isinstance(value, list) else 'an object'} with {len(value)} members"
    try:
        return one_line(_SHORT.repr(value))[:100]
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}.get(
        type(value), "null"
    )
