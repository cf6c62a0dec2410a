"""Which argument of ``forward`` an input is, and which of its results an output is.

Source: docs/spec/behaviours.md section 10.3. Inputs have, all of them, one of: the names of forward's arguments;
``<name>__<index>`` with the argument's position; the keys of a dictionary, if that is forward's only argument; or
any other names, which then stand in the order of the arguments. Outputs are ``<name>__<index>``, or in order; keys
where the result is a dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace import ConfigError


def positions(names: Sequence[str], direction: str, arguments: Sequence[str] | None = None) -> list[int]:
    """The position of each name. ``arguments`` are forward's, where they are known; ``direction`` is ``input`` or
    ``output``.

    Raises `ConfigError` for names that follow two conventions at once, and for a position that is taken twice or that
    forward does not have.
    """
    if arguments is not None and all(name in arguments for name in names):
        return [arguments.index(name) for name in names]
    found = [_index(name) for name in names]
    if all(place is None for place in found):
        return list(range(len(names)))
    places = []
    for name, place in zip(names, found, strict=True):
        if place is None:
            raise ConfigError(f"{direction} '{name}' does not follow <name>__<index> naming convention.")
        places.append(place)
    for name, place in zip(names, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{direction} '{name}' has index {place}, as another {direction} has")
    return places


def check_arguments(model: str, places: Sequence[int], arguments: Sequence[str], required: Sequence[str]) -> None:
    """Raises `ConfigError` unless ``places`` are arguments that forward has, with all that it needs among them."""
    given = {arguments[place] for place in places if place < len(arguments)}
    if len(given) < len(places) or not given.issuperset(required):
        raise ConfigError(
            f"unable to load model '{model}', configuration expects {len(places)} inputs, model provides "
            f"{len(arguments)}: forward({', '.join(arguments)})"
        )


def _index(name: str) -> int | None:
    """The index that ``name`` ends with; None if it is no ``<name>__<index>``."""
    _, mark, index = name.rpartition("__")
    return int(index) if mark and index.isascii() and index.isdigit() and len(index) <= 4 else None
