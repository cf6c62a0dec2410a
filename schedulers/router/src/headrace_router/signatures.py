"""The inputs and outputs of a router: those of its baseline. Every other target must be compatible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace import ConfigError, Dependency, ModelConfig, ModelInput, ModelOutput, OtherModel, Spec
from headrace_router.routing_table import RoutingTable

_FIELD = "parameters['scheduler.targets']"


def complete(config: ModelConfig, table: RoutingTable, others: Mapping[Dependency, OtherModel]) -> None:
    """Set the inputs, outputs, batch size and transaction policy of ``config`` from the targets of ``table``.

    Raises `ConfigError` if a target is not compatible with the first one, or if the config itself has others. Targets
    that are not in ``others`` are not checked.
    """
    targets = table.targets
    found = [(target, others[target.dependency]) for target in targets if target.dependency in others]
    if not found or found[0][0] is not targets[0]:
        return  # without the baseline there is nothing to compare with
    baseline, model = found[0]
    for target, other in found[1:]:
        check_stands_for(config.name, baseline.label, model, target.label, other)
    if table.shadow and (shadow := others.get(table.shadow[0].dependency)) is not None:
        check_stands_for(config.name, baseline.label, model, table.shadow[0].label, shadow)
        if model.config.model_transaction_policy.decoupled:
            raise ConfigError(
                f"router '{config.name}': '{baseline.label}' is decoupled, and responses of decoupled models are not "
                "compared: leave out the shadow",
                field="parameters['scheduler.shadow']",
            )
    _complete_tensors(config, "input", baseline.label, model)
    _complete_tensors(config, "output", baseline.label, model)
    most = min(other.config.max_batch_size for _, other in found)
    if config.max_batch_size > most:
        raise ConfigError(
            f"router '{config.name}' allows maximum batch size {config.max_batch_size}, but its targets allow {most}",
            field="max_batch_size",
        )
    config.max_batch_size = config.max_batch_size or most
    config.model_transaction_policy.decoupled = model.config.model_transaction_policy.decoupled


def check_stands_for(router: str, name: str, model: OtherModel, other_name: str, other: OtherModel) -> None:
    """Raise `ConfigError` unless ``other`` accepts every request to ``model`` and returns all its outputs."""

    def wrong(what: str, here: object, there: object) -> ConfigError:
        return ConfigError(
            f"router '{router}': target '{other_name}' cannot stand for '{name}': {what} is {there} in '{other_name}' "
            f"and {here} in '{name}'",
            field=_FIELD,
        )

    if (model.config.max_batch_size > 0) != (other.config.max_batch_size > 0):
        raise wrong("max_batch_size", model.config.max_batch_size, other.config.max_batch_size)
    decoupled = [bool(each.config.model_transaction_policy.decoupled) for each in (model, other)]
    if decoupled[0] != decoupled[1]:
        raise wrong("the transaction policy", *("decoupled" if each else "not decoupled" for each in decoupled))
    for kind, specs, theirs in (("input", model.inputs, other.inputs), ("output", model.outputs, other.outputs)):
        for spec in specs.values():
            there = theirs.get(spec.name)
            if there is None or _words(spec) != _words(there):
                raise wrong(f"{kind} '{spec.name}'", _words(spec), "missing" if there is None else _words(there))
    for spec in other.inputs.values():
        if spec.name not in model.inputs and not spec.optional:
            raise wrong(f"input '{spec.name}'", "missing", _words(spec))


def _words(spec: Spec) -> str:
    dims = ",".join(map(str, spec.dims))
    return f"{'optional ' if spec.optional else ''}{spec.datatype.config_name} [{dims}]"


def _complete_tensors(config: ModelConfig, kind: str, name: str, model: OtherModel) -> None:
    """Copy the tensors of ``model``, or check those in ``config``."""
    own: Any = getattr(config, kind)
    theirs: Sequence[ModelInput | ModelOutput] = getattr(model.config, kind)
    if not own:
        for tensor in theirs:
            added = own.add()
            added.CopyFrom(tensor)
            added.ClearField("reshape")  # the target reshapes
            if kind == "output":
                added.ClearField("label_filename")  # a file of the target's directory
        return
    specs = model.inputs if kind == "input" else model.outputs
    given = {tensor.name: Spec.from_config(tensor) for tensor in own}
    for index, (tensor, spec) in enumerate(zip(own, given.values(), strict=True)):
        expected = specs.get(tensor.name)
        if expected is None or _words(spec) != _words(expected):
            there = "has none of this name" if expected is None else f"has {_words(expected)}"
            raise ConfigError(
                f"router '{config.name}': {kind} '{tensor.name}' is {_words(spec)}, and target '{name}' {there}; leave "
                f"out {kind} to have that of the target",
                field=f"{kind}[{index}]",
            )
    left_out = [spec.name for spec in specs.values() if spec.name not in given and not spec.optional]
    if kind == "input" and left_out:
        raise ConfigError(
            f"router '{config.name}': input '{left_out[0]}' of target '{name}' is missing; leave out input to have "
            "those of the target",
            field=kind,
        )
