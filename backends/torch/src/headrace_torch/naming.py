"""Map inputs to the arguments of ``forward``, and outputs to its results.

Source: docs/spec/behaviours.md section 10.3. Inputs have, all of them, one of: the names of forward's arguments;
``<name>__<index>`` with the argument's position; the keys of a dictionary, if that is forward's only argument; or
any other names, which then stand in the order of the arguments. Outputs are ``<name>__<index>``, or in order; keys
where the result is a dictionary. Where only some names follow a convention, all stand in order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace import ConfigError

log = logging.getLogger("headrace.pytorch")


def positions(names: Sequence[str], direction: str, arguments: Sequence[str] | None = None) -> list[int]:
    """Return the position of each name. ``arguments`` are forward's, where they are known; ``direction`` is ``input``
    or ``output``.

    Raises `ConfigError` for a position that is taken twice or that forward does not have.
    """
    if arguments is not None and all(name in arguments for name in names):
        return [arguments.index(name) for name in names]
    places = [place for place in map(_index, names) if place is not None]
    if len(places) < len(names):
        if places:
            first = next(name for name in names if _index(name) is None)
            log.warning(
                "%s '%s' does not follow the <name>__<index> naming convention. Falling back to enforcing strict "
                "ordering from model configuration.",
                direction,
                first,
            )
        return list(range(len(names)))
    for name, place in zip(names, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{direction} '{name}' has index {place}, as another {direction} has")
    return places


def check_arguments(model: str, places: Sequence[int], arguments: Sequence[str], required: Sequence[str]) -> None:
    """Raise `ConfigError` unless ``places`` are arguments that forward has, with all that it needs among them."""
    passed = {arguments[place] for place in places if place < len(arguments)}
    if len(passed) < len(places) or not passed.issuperset(required):
        raise ConfigError(
            f"unable to load model '{model}', configuration expects {len(places)} inputs, model provides "
            f"{len(arguments)}: forward({', '.join(arguments)})"
        )


def _index(name: str) -> int | None:
    """Return the index that ``name`` ends with; None if it is no ``<name>__<index>``."""
    _, mark, index = name.rpartition("__")
    return int(index) if mark and index.isascii() and index.isdigit() and len(index) <= 4 else None
