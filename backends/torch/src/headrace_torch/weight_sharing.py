"""How many instances a model has on the CPU, and whether they run one module: decided here, in one place.

Two instances that share their weights answer more than one that has all cores: while one's operator waits for its
slowest thread, or its answers are written, the other computes. That holds for what is known not to keep anything from
one request to the next, or whose executions can take turns. A program of the user's own, in Python or native, has one
instance unless the config says otherwise, as on Triton.
"""

from __future__ import annotations

from headrace import Model, ModelConfig, read_isolation

#: Of models that can share their weights, where the config gives no count.
SHARING_INSTANCES = 2


def default_instances(config: ModelConfig) -> int:
    """Instances on the CPU where ``config`` gives no count; each that shares no weights would have its own.

    Raises `ConfigError` for an ``isolation`` that there is not."""
    given = config.parameters
    asked = given["ENABLE_WEIGHT_SHARING"].string_value.lower() if "ENABLE_WEIGHT_SHARING" in given else ""
    is_trusted = "trust" in given and given["trust"].string_value.lower() == "true"
    shares = _is_known_not_to_mind(config, is_trusted) and asked != "false"
    return SHARING_INSTANCES if shares and read_isolation(given) != "process" else 1


def shares_weights(model: Model) -> bool:
    """Whether the instances of ``model`` on a device run one module: as its parameter says, or else if that is safe."""
    asked: bool | None = model.parameters.enable_weight_sharing
    if asked is not None:
        return asked
    return model.device.kind == "cpu" and _is_known_not_to_mind(model.config, model.parameters.trust)


def takes_turns(model: Model, changes: bool) -> bool:
    """Whether executions of ``model`` go one by one. It ``changes`` something that the next one sees, as a counter, and
    nobody has said that its instances may share that."""
    unasked = model.parameters.enable_weight_sharing is None
    return unasked and changes and shares_weights(model) and instances_of(model.config) > 1


def instances_of(config: ModelConfig) -> int:
    """How many there are of every group; at least 1."""
    return sum(group.count or 1 for group in config.instance_group) or 1


def _is_known_not_to_mind(config: ModelConfig, is_trusted: bool) -> bool:
    """Whether it can be found out of the file what it changes: so it is for TorchScript, and for programs that are not
    trusted. What a sequence leaves behind in a module is its instance's."""
    is_trusted_program = is_trusted and is_pt2(config)
    return not config.runtime and not is_trusted_program and not config.HasField("sequence_batching")


def is_pt2(config: ModelConfig) -> bool:
    """Whether the model's file is a ``.pt2``, of torch.export or AOTInductor."""
    if config.runtime:
        return False
    return config.default_model_filename.endswith(".pt2") or (
        not config.default_model_filename and config.platform == "torch_aoti"
    )
