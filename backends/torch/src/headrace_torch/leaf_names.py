"""Map the inputs and outputs of a config to the arguments and results of a program or package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace import ConfigError, ModelConfig
from headrace_engines import Graph, GraphTensor, check_against_graph
from headrace_torch.naming import positions
from headrace_torch.program_signature import Leaf, ProgramSignature

_PLACES = ("ARGS[", "KWARGS[", "RESULT[")


class LeafNames:
    """The names of ``config`` for the leaves of ``signature``: ``inputs`` and ``outputs`` map a name to its leaf.

    A leaf that the config leaves out has its name in the file. Raises `ConfigError` for names that follow no
    convention, or two.
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
        """Raise `ConfigError`, or `LoadError` for a type that cannot be served, if config and file differ. Triton's
        words.
        """
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
        """Return the leaves by these names, in the order of the program. Fields that the file does not have are the
        config's.
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
