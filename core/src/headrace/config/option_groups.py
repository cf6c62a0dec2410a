"""Options of plugins: a frozen dataclass whose fields are flags of ``headrace serve``.

::

    @dataclass(frozen=True)
    class LinesOptions(OptionGroup):
        \"\"\"A port that is asked line by line.\"\"\"

        name: ClassVar[str] = "lines"
        port: int = field(default=8004, metadata={"help": "Port; 0 takes a free one."})

adds the flag ``--lines-port``. The plugin reads its value from ``options.group(LinesOptions)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
#: For each type: the name of the flag's argument in the help, and the function that parses it.
_READERS: dict[object, tuple[str, Callable[[str], Any]]] = {
    str: ("string", str),
    int: ("integer", int),
    float: ("number", float),
    bool: ("bool", lambda text: _BOOLEANS[text.lower()]),
}


class OptionGroup:
    """The options of one plugin. Its flags start with ``name``; the help prints the docstring above them.

    A field is str, int, float, bool, a `Literal` of strings, or one of these or None. A field without a default is
    required. Its ``metadata`` may have a ``help``, and ``opens``, a function from the value to texts about what it
    opens to callers, for ``headrace check --security``. A `ValueError` from ``__post_init__`` is a usage error.
    """

    name: ClassVar[str]


G = TypeVar("G", bound=OptionGroup)


@dataclass(frozen=True, slots=True)
class GroupFlag:
    """One field as a flag: ``--lines-port``."""

    text: str
    field: str
    argument: str
    help: str
    default: object
    is_required: bool
    read: Callable[[str], Any]


#: The result of `group_flags` for each class: the type hints of all plugins take 10 ms, and a start reads them 4 times.
_FLAGS: dict[type[OptionGroup], Sequence[GroupFlag]] = {}


def group_flags(kind: type[OptionGroup]) -> Sequence[GroupFlag]:
    """Return the flags of a group. Raises TypeError for a class that is no valid group."""
    if kind in _FLAGS:
        return _FLAGS[kind]
    settings: Any = getattr(kind, "__dataclass_params__", None)
    if settings is None or not settings.frozen:
        raise TypeError(f"option group {kind.__name__} is no frozen dataclass")
    if not re.fullmatch("[a-z][a-z0-9-]*", kind.name):
        raise TypeError(
            f"option group {kind.__name__} is named {kind.name!r}, not in lower-case letters, digits and '-'"
        )
    hints, flags = get_type_hints(kind), list[GroupFlag]()
    for each in fields(kind):  # type: ignore[arg-type]
        argument, read = _reader(hints[each.name], f"{kind.__name__}.{each.name}")
        default = each.default if each.default_factory is MISSING else each.default_factory()
        flag = f"--{kind.name}-{each.name.replace('_', '-')}"
        help_text = str(each.metadata.get("help", ""))
        flags.append(GroupFlag(flag, each.name, argument, help_text, default, default is MISSING, read))
    _FLAGS[kind] = flags
    return flags


def read_groups(kinds: Sequence[type[OptionGroup]], words: Sequence[str]) -> tuple[tuple[OptionGroup, ...], list[str]]:
    """Return an instance of each group with the values in ``words``, and the words that belong to no group. Raises
    `ConfigError`."""
    flags = {flag.text: (kind, flag) for kind in kinds for flag in group_flags(kind)}
    values_by_kind: dict[type[OptionGroup], dict[str, Any]] = {kind: {} for kind in kinds}
    rest, waiting = [], iter(words)
    for word in waiting:
        name, equals, text = word.partition("=")
        if name not in flags:
            rest.append(word)
            continue
        if not equals:
            following = next(waiting, None)
            if following is None:
                raise ConfigError(f"option '{name}' requires an argument")
            text = following
        kind, flag = flags[name]
        values_by_kind[kind][flag.field] = _read(flag, text)
    return tuple(_make(kind, values) for kind, values in values_by_kind.items()), rest


def complete_groups(
    kinds: Iterable[type[OptionGroup]], groups: Sequence[OptionGroup], faults: Sequence[str] = ()
) -> tuple[OptionGroup, ...]:
    """Return a group of each of ``kinds``: the one in ``groups``, or else one with all defaults. Raises `ConfigError`
    if ``groups`` has a group that is not in ``kinds``, with the ``faults`` of plugins."""
    known = tuple(kinds)
    for group in groups:
        if type(group) not in known:
            names = ", ".join(kind.__name__ for kind in known) or "none"
            text = f"plugin_options: no plugin has the options {type(group).__name__}; there are: {names}"
            raise ConfigError("; ".join((text, *faults)))
    by_kind = {type(group): group for group in groups}
    return tuple(by_kind.get(kind) or _make(kind, {}) for kind in known)


def _make(kind: type[G], values: dict[str, Any]) -> G:
    for flag in group_flags(kind):
        if flag.is_required and flag.field not in values:
            raise ConfigError(f"{flag.text} must be specified")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f'Bad options "--{kind.name}-...".\n{error}') from error


def _read(flag: GroupFlag, text: str) -> Any:
    try:
        return flag.read(text)
    except (ValueError, KeyError):
        raise ConfigError(f'Bad option: "{flag.text}".\nexpected <{flag.argument}>, got: {text}') from None


def _reader(kind: Any, field: str) -> tuple[str, Callable[[str], Any]]:
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "|".join(choices), {choice: choice for choice in choices}.__getitem__
    if kind not in _READERS:
        raise TypeError(f"option {field} is of type {kind}, which no flag is read as")
    return _READERS[kind]
