"""Conditional steps: an extension of Triton's config, in the model's parameters.

``ensemble.when.1`` is ``flag``: step 1 runs if the ensemble tensor ``flag`` is true. ``!flag``: if it is false. A step
may also be named by its model, if no other step calls that model.

If a step did not run, its outputs do not exist: a step that needs one does not run either, and an optional input is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace import ConfigError, ModelConfig, dtypes

_PREFIX = "ensemble."
_WHEN = "ensemble.when."
#: Data types that can be true or false.
TRUTH = (
    dtypes.BOOL,
    dtypes.INT8,
    dtypes.INT16,
    dtypes.INT32,
    dtypes.INT64,
    dtypes.UINT8,
    dtypes.UINT16,
    dtypes.UINT32,
    dtypes.UINT64,
)


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition that ``tensor`` is true, or false if ``is_negated``. ``field`` is its place in the config."""

    tensor: str
    is_negated: bool
    field: str


def conditions(config: ModelConfig) -> dict[int, Condition]:
    """Return the condition of each step that has one. Raises `ConfigError` for an unknown step or tensor."""
    steps = config.ensemble_scheduling.step
    tensors = {io.name for io in config.input}
    tensors.update(tensor for step in steps for tensor in step.output_map.values())
    found: dict[int, Condition] = {}
    for key in sorted(key for key in config.parameters if key.startswith(_PREFIX)):
        field, text = f"parameters[{key!r}]", config.parameters[key].string_value
        if not key.startswith(_WHEN):
            raise ConfigError(
                f"unknown parameter '{key}' of ensemble '{config.name}'; known: {_WHEN}<step>", field=field
            )
        index = _step(config, key.removeprefix(_WHEN), field)
        tensor = text.removeprefix("!").strip()
        if tensor not in tensors:
            raise ConfigError(
                f"in ensemble {config.name}, parameter '{key}' is '{text}', but no input and no step gives an ensemble "
                f"tensor '{tensor}'; there are {', '.join(sorted(tensors))}",
                field=field,
            )
        if index in found:
            raise ConfigError(f"in ensemble {config.name}, step {index} has two conditions", field=field)
        found[index] = Condition(tensor, text.startswith("!"), field)
    return found


def _step(config: ModelConfig, name: str, field: str) -> int:
    """Return the step ``name``: its number, or the model that only this step calls."""
    steps = config.ensemble_scheduling.step
    if name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(steps):
        return int(name)
    indices = [index for index, step in enumerate(steps) if step.model_name == name]
    if len(indices) == 1:
        return indices[0]
    what = f"is the model of steps {', '.join(map(str, indices))}" if indices else "is no step"
    raise ConfigError(
        f"in ensemble {config.name}, parameter '{_WHEN}{name}': '{name}' {what}; steps are numbered from 0 to "
        f"{len(steps) - 1}",
        field=field,
    )
