"""Which argument of a program, or of a package, an input of the config is, and which result an output is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace import (
    ConfigError,
    Graph,
    GraphTensor,
    ModelConfig,
    ModelInput,
    ModelOutput,
    check_against_graph,
    config_to_json,
    dtypes,
    inputs_of_padding,
)
from headrace_torch.naming import positions
from headrace_torch.program_signature import Leaf, ProgramSignature

_PLACES = ("ARGS[", "KWARGS[", "RESULT[")


class LeafNames:
    """The names that ``config`` has for the leaves of ``signature``: ``inputs`` and ``outputs`` say of a name which
    leaf it is. What the config leaves out has the name that the file has for it.

    Raises `ConfigError` for names that follow no convention, or two."""

    def __init__(self, config: ModelConfig, signature: ProgramSignature) -> None:
        batching = config.sequence_batching
        taken = [io.name for io in config.input] + [name for each in config.batch_input for name in each.target_name]
        taken += [control.name for control in batching.control_input] + [state.input_name for state in batching.state]
        taken += inputs_of_padding(config_to_json(config))
        given = [io.name for io in config.output] + [state.output_name for state in batching.state]
        self._config, self._signature = config, signature
        self.inputs = _places(config, list(dict.fromkeys(taken)), signature.inputs, "input")
        self.outputs = _places(config, list(dict.fromkeys(given)), signature.outputs, "output")

    @property
    def ordered_inputs(self) -> list[str]:
        """A name for each input, in the order of the program's."""
        return [tensor.name for tensor in self._tensors(self._signature.inputs, self.inputs)]

    def require_agreement(self) -> None:
        """Raises `ConfigError`, or `LoadError` for a type that cannot be served, where the config says otherwise than
        the file, in Triton's words."""
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
        """The leaves by these names."""
        inputs = self._tensors(self._signature.inputs, self.inputs)
        outputs = self._tensors(self._signature.outputs, self.outputs)
        return Graph({each.name: each for each in inputs}, {each.name: each for each in outputs})

    def _tensors(self, leaves: Sequence[Leaf], places: Mapping[str, int]) -> list[GraphTensor]:
        names = {place: name for name, place in places.items()}
        tensors = [replace(leaf.tensor, name=names.get(place, leaf.tensor.name)) for place, leaf in enumerate(leaves)]
        return [each if leaf.is_known else self._told(each) for each, leaf in zip(tensors, leaves, strict=True)]

    def _told(self, tensor: GraphTensor) -> GraphTensor:
        """``tensor``, of which the file says nothing, as the config has it."""
        batch = (-1,) if self._config.max_batch_size > 0 else ()
        described: list[ModelInput | ModelOutput] = [*self._config.input, *self._config.output]
        for io in described:
            if io.name == tensor.name:
                dims = io.reshape.shape if io.HasField("reshape") else io.dims
                return replace(tensor, datatype=dtypes.BY_CONFIG_VALUE[io.data_type], shape=(*batch, *dims))
        for state in self._config.sequence_batching.state:
            if tensor.name in (state.input_name, state.output_name):
                return replace(tensor, datatype=dtypes.BY_CONFIG_VALUE[state.data_type], shape=(*batch, *state.dims))
        if any(tensor.name == control.name for control in self._config.sequence_batching.control_input):
            return replace(tensor, shape=(*batch, 1))
        return tensor


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
