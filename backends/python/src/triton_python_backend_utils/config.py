"""A model's config for its code: look-ups by name, and the changes that ``auto_complete_config`` may make.

The texts of the refusals are Triton's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the properties of the input ``name``, None if the config has no such input."""
    return _configured(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the properties of the output ``name``, None if the config has no such output."""
    return _configured(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """True if a model with this config may give any number of responses per request."""
    policy = _part(model_config, "model_transaction_policy") or {}
    return bool(policy.get("decoupled", False))


def _configured(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    entries: Iterable[dict[str, Any]] = _part(model_config, kind) or ()
    return next((entry for entry in entries if entry["name"] == name), None)


def _part(model_config: Any, name: str) -> Any:
    if isinstance(model_config, (str, bytes)):  # ``args["model_config"]`` as it is
        raise TypeError("the config of a model must be a dict, found its text: json.loads makes one of it")
    return model_config.get(name)


_INPUT = ("name", "data_type", "dims", "optional")
_OUTPUT = ("name", "data_type", "dims")


class ModelConfig:
    """A model's config, from JSON text. Existing fields can be completed, but not changed."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the config itself, not a copy."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raise ValueError if the config asks for more."""
        configured = self._config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function "
                f"for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raise ValueError if the config has another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input, or complete the one of that name.

        ``input`` has name, data_type and dims, and may have optional. Raises ValueError where it
        has another property, lacks one, or contradicts the config.
        """
        self._add("input", input, _INPUT)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Do as `add_input`; an output is never optional."""
        self._add("output", output, _OUTPUT)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set ``decoupled``. Raises ValueError for another property, and if the config says otherwise."""
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' "
                "contains property other than 'decoupled'."
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        for decoupled in transaction_policy_dict.values():
            if policy.setdefault("decoupled", decoupled) != decoupled:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                    f"which is already set to '{policy['decoupled']}'."
                )

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, kind: str, properties: Mapping[str, Any], allowed: Sequence[str]) -> None:
        self._check_properties(kind, properties, allowed)
        entries: list[dict[str, Any]] = self._config.setdefault(kind, [])
        for entry in entries:
            if entry["name"] == properties["name"]:
                self._check_agreement(kind, entry, properties)
                entry.update(properties)
                return
        entries.append(dict(properties))

    def _check_properties(self, kind: str, properties: Mapping[str, Any], allowed: Sequence[str]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in properties:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        if set(properties) - set(allowed):
            known = ", ".join(f"'{name}'" for name in allowed[:-1])
            raise ValueError(
                f"{kind} '{properties['name']}' {where} contains property other than {known} and '{allowed[-1]}'."
            )
        for name in ("data_type", "dims"):
            if name not in properties:
                raise ValueError(f"{kind} '{properties['name']}' {where} is missing '{name}' property.")

    def _check_agreement(self, kind: str, entry: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        expected = entry.get("data_type", "TYPE_INVALID")
        if expected not in ("TYPE_INVALID", properties["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {expected} "
                f"for {kind} '{properties['name']}', model provides {properties['data_type']}"
            )
        if entry.get("dims") and list(entry["dims"]) != list(properties["dims"]):
            self._refuse("dims", entry, properties)
        if "optional" in entry and "optional" in properties and entry["optional"] != properties["optional"]:
            self._refuse("optional", entry, properties)

    def _refuse(self, what: str, entry: Mapping[str, Any], properties: Mapping[str, Any]) -> NoReturn:
        raise ValueError(
            f"model '{self._name}', tensor '{properties['name']}': the model expects {what} {properties[what]} "
            f"but the model configuration specifies {what} {entry[what]}"
        )
