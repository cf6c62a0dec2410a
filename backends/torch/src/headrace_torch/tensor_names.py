"""Maps inputs of a config to the arguments of ``forward``, and outputs to its results.

All inputs follow one of these conventions (docs/spec/behaviours.md section 10.3):

- the names of forward's arguments
- ``<name>__<index>``, with the argument's position
- the keys of a dictionary, if that is forward's only argument
- any other names, in the order of the arguments

Outputs are ``<name>__<index>``, the keys of a dictionary, or in order. If only some names follow a convention, all are
mapped in order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace import ConfigError, ModelConfig
from headrace_engines import Graph, GraphTensor, check_against_graph
from headrace_torch.program_signature import Leaf, ProgramSignature

log = logging.getLogger("headrace.pytorch")


def positions(names: Sequence[str], direction: str, arguments: Sequence[str] | None = None) -> list[int]:
    """Return the position of each name. ``arguments`` are forward's, or None if they are unknown. ``direction`` is
    ``input`` or ``output``.

    Raises `ConfigError` for a position that two names have.
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
    """Raise `ConfigError` unless ``places`` are arguments of forward, and include all ``required`` ones."""
    passed = {arguments[place] for place in places if place < len(arguments)}
    if len(passed) < len(places) or not passed.issuperset(required):
        raise ConfigError(
            f"unable to load model '{model}', configuration expects {len(places)} inputs, model provides "
            f"{len(arguments)}: forward({', '.join(arguments)})"
        )


def _index(name: str) -> int | None:
    """Return the index at the end of ``name``; None if it is no ``<name>__<index>``."""
    _, mark, index = name.rpartition("__")
    return int(index) if mark and index.isascii() and index.isdigit() and len(index) <= 4 else None


# ---------------------------------------------------------------------- of a program or package

_PLACES = ("ARGS[", "KWARGS[", "RESULT[")


class LeafNames:
    """The names in ``config`` of the leaves of ``signature``: ``inputs`` and ``outputs`` map a name to its leaf.

    A leaf that is not in the config has its name in the file. Raises `ConfigError` if names mix two conventions.
    """

    def __init__(self, config: ModelConfig, signature: ProgramSignature) -> None:
        self._config, self._signature = config, signature
        self._configured = Graph.of_config(config)
        self.inputs = _places(config, list(self._configured.inputs), signature.inputs, "input")
        self.outputs = _places(config, list(self._configured.outputs), signature.outputs, "output")

    @property
    def ordered_inputs(self) -> list[str]:
        """A name for each input, in the order of the program's."""
        return list(self.graph().inputs)

    def require_agreement(self) -> None:
        """Raise `ConfigError` in Triton's words if config and file differ, and `LoadError` for an unsupported type."""
        config, most = self._config, self._signature.most_rows
        if config.max_batch_size > 1 and any(not leaf.is_known for leaf in self._signature.inputs):
            raise ConfigError(
                f"unable to load model '{config.name}', configuration specified max-batch {config.max_batch_size} but "
                "the package does not tell whether its first dimension may vary: max_batch_size may be 1, or 0"
            )
        if most is not None and config.max_batch_size > most:
            raise ConfigError(
                f"unable to load model '{config.name}', configuration specified max-batch {config.max_batch_size} but "
                f"the program only supports max-batch {most}"
            )
        check_against_graph(config, self.graph())

    def graph(self) -> Graph:
        """Return the leaves by these names, in the order of the program. The config supplies fields that the file
        lacks.
        """
        return Graph(
            _tensors(self._signature.inputs, self.inputs, self._configured.inputs),
            _tensors(self._signature.outputs, self.outputs, self._configured.outputs),
        )


def _tensors(
    leaves: Sequence[Leaf], places: Mapping[str, int], configured: Mapping[str, GraphTensor]
) -> dict[str, GraphTensor]:
    names = {place: name for name, place in places.items()}
    tensors = [replace(leaf.tensor, name=names.get(place, leaf.tensor.name)) for place, leaf in enumerate(leaves)]
    return {
        each.name: each if leaf.is_known else configured.get(each.name, each)
        for each, leaf in zip(tensors, leaves, strict=True)
    }


def _places(config: ModelConfig, names: Sequence[str], leaves: Sequence[Leaf], direction: str) -> dict[str, int]:
    own, paths = [leaf.tensor.name for leaf in leaves], [leaf.path for leaf in leaves]
    if names and all(name in paths for name in names):
        return {name: paths.index(name) for name in names}
    misfits = [name for name in names if name not in paths]
    if any(name.startswith(_PLACES) for name in names):
        raise ConfigError(
            f"{direction} '{misfits[0]}' does not follow the naming convention of the others, or is not in the model, "
            f"which has {', '.join(paths)}"
        )
    found = positions(names, direction, own)
    if any(place >= len(leaves) for place in found):
        raise ConfigError(
            f"unable to load model '{config.name}', configuration expects {len(names)} {direction}s, model provides "
            f"{len(leaves)}: {', '.join(own)}"
        )
    return dict(zip(names, found, strict=True))
