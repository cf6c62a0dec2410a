"""Checks that the models of an ensemble fit together, tensor by tensor.

Core has checked each config by itself. Source: docs/spec/behaviours.md section 4.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace import ConfigError, DataType, Dependency, ModelConfig, OtherModel, Spec
from headrace_ensemble.conditions import TRUTH, Condition, conditions
from headrace_ensemble.plan import dependency_of, in_order, reads_of


@dataclass(frozen=True, slots=True)
class Side:
    """One model's description of a tensor. ``where`` names it in messages."""

    model: str
    datatype: DataType
    dims: tuple[int, ...]
    batched: bool
    where: str

    @property
    def full_dims(self) -> tuple[int, ...]:
        """The dims of a request, with the batch axis."""
        return (-1, *self.dims) if self.batched else self.dims


def check(config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> bool:
    """Return True if the ensemble of ``config`` is decoupled.

    Raises `ConfigError` for the first contradiction, with step, tensor and both sides. Models that are not in
    ``others`` are not checked.
    """
    sides = {
        io.name: Side(
            config.name, spec.datatype, spec.backend_dims, config.max_batch_size > 0, f"the ensemble's {kind}"
        )
        for kind, tensors in (("input", config.input), ("output", config.output))
        for io in tensors
        for spec in (Spec.from_config(io),)
    }
    for index, step in enumerate(config.ensemble_scheduling.step):
        if (model := others.get(dependency_of(step))) is not None:
            _check_batch_size(config, index, model)
            _check_step(config, index, model, sides)
    if len(in_order(config)) < len(config.ensemble_scheduling.step):
        raise ConfigError(f"in ensemble {config.name}, conditions of steps wait for each other", field="parameters")
    for index, condition in conditions(config).items():
        if condition.tensor in sides:
            _check_condition(config, index, condition, sides[condition.tensor])
    return _is_decoupled(config, others)


def _check_batch_size(config: ModelConfig, index: int, model: OtherModel) -> None:
    most, own = config.max_batch_size, model.config.max_batch_size
    if 0 < own < most:
        raise ConfigError(
            f"ensemble {config.name} allows maximum batch size {most}, but it contains model {model.config.name} which "
            f"only allows maximum batch size to be {own}",
            field=_field(index, "model_name"),
        )


def _check_step(config: ModelConfig, index: int, model: OtherModel, sides: dict[str, Side]) -> None:
    step = config.ensemble_scheduling.step[index]
    for name, tensor in sorted(step.input_map.items()):
        if name not in model.inputs:
            raise ConfigError(
                f"in ensemble {config.name}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model_name} (step {index}){_known(model.inputs)}",
                field=_field(index, "input_map", name),
            )
    for spec in model.inputs.values():
        tensor = step.input_map.get(spec.name, "")
        if tensor:
            side = _side(model, spec, f"input {spec.name} of step {index}")
            _compare(config.name, tensor, sides.setdefault(tensor, side), side, _field(index, "input_map", spec.name))
        elif not spec.optional:
            raise ConfigError(
                f"in ensemble {config.name}, input {spec.name} in model {step.model_name} is not mapped to any "
                f"ensemble tensors (step {index})",
                field=_field(index, "input_map"),
            )
    for name, tensor in sorted(step.output_map.items()):
        if name not in model.outputs:
            raise ConfigError(
                f"in ensemble {config.name}, ensemble tensor {tensor} is mapped from non-existing output {name} in "
                f"model {step.model_name} (step {index}){_known(model.outputs)}",
                field=_field(index, "output_map", name),
            )
        side = _side(model, model.outputs[name], f"output {name} of step {index}")
        _compare(config.name, tensor, sides.setdefault(tensor, side), side, _field(index, "output_map", name))


def _check_condition(config: ModelConfig, index: int, condition: Condition, side: Side) -> None:
    what = f"in ensemble {config.name}, step {index} runs when ensemble tensor {condition.tensor} says so, which is"
    if side.datatype not in TRUTH:
        raise ConfigError(
            f"{what} {side.datatype.config_name} ({side.where}); expected TYPE_BOOL or an integer",
            field=condition.field,
        )
    if any(dim != 1 for dim in side.dims):
        raise ConfigError(
            f"{what} no scalar: its shape is {_shape(side.dims)} ({side.where}); expected [1]", field=condition.field
        )


def _side(model: OtherModel, spec: Spec, where: str) -> Side:
    return Side(model.config.name, spec.datatype, spec.dims, model.config.max_batch_size > 0, where)


def _compare(ensemble: str, tensor: str, known: Side, side: Side, field: str) -> None:
    """Raise unless both sides can describe the same ``tensor``."""
    prefix, where = f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent", f" ({known.where}, {side.where})"
    if known.datatype is not side.datatype:
        raise ConfigError(
            f"{prefix} data type: {known.datatype.config_name} is inferred from model {known.model} while "
            f"{side.datatype.config_name} is inferred from model {side.model}{where}",
            field=field,
        )
    if not (_match(known.dims, side.dims) or _match(known.full_dims, side.full_dims)):
        raise ConfigError(
            f"{prefix} shape: {_shape(known.full_dims)} is inferred from model {known.model} while "
            f"{_shape(side.full_dims)} is inferred from model {side.model}{where}",
            field=field,
        )


def _match(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def _is_decoupled(config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> bool:
    """Return True if an output depends on a decoupled step.

    Raises `ConfigError` for a step that reads tensors from different decoupled steps, because their responses cannot be
    matched.
    """
    steps, found = config.ensemble_scheduling.step, conditions(config)
    origin = {io.name: -1 for io in config.input}
    for index in in_order(config):
        step, model = steps[index], others.get(dependency_of(steps[index]))
        origins = {origin.get(tensor, -1) for tensor in reads_of(config, index, found)}
        if len(origins) > 1:
            tensors = ", ".join(
                f"{tensor} of {_origin_name(config, origin.get(tensor, -1))}"
                for tensor in sorted(step.input_map.values())
            )
            raise ConfigError(
                f"in ensemble {config.name}, step of model '{step.model_name}' receives inputs originated from "
                f"different decoupled models (step {index} reads {tensors})",
                field=_field(index, "input_map"),
            )
        is_decoupled = model is not None and model.config.model_transaction_policy.decoupled
        for tensor in step.output_map.values():
            origin[tensor] = index if is_decoupled else min(origins)
    origins = {origin.get(output.name, -1) for output in config.output}
    if len(origins) > 1:
        tensors = ", ".join(f"{io.name} of {_origin_name(config, origin.get(io.name, -1))}" for io in config.output)
        raise ConfigError(
            f"in ensemble {config.name}, step of model '{config.name}' receives inputs originated from different "
            f"decoupled models (its outputs are {tensors})",
            field="output",
        )
    return origins != {-1}


def _origin_name(config: ModelConfig, origin: int) -> str:
    return f"'{config.ensemble_scheduling.step[origin].model_name}'" if origin >= 0 else "the request"


def _known(specs: Iterable[str]) -> str:
    return f", which has {', '.join(specs)}"


def _shape(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _field(index: int, part: str, key: str = "") -> str:
    return f"ensemble_scheduling.step[{index}].{part}" + (f"[{key!r}]" if key else "")
