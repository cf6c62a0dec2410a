"""Decides how many instances a model has on the CPU, and if they share one module.

Two instances that share their weights have a higher throughput than one with all cores: while one waits for the slowest
thread of an operator, or for its results to be written, the other computes. A model with state can share if its
executions run one at a time. Code of the user, in Python or native, has one instance by default, as in Triton.
"""

from __future__ import annotations

from headrace import Model, ModelConfig, read_isolation

#: The default number of instances of a model that can share its weights.
SHARING_INSTANCES = 2


def default_instances(config: ModelConfig) -> int:
    """Return the number of instances on the CPU for a ``config`` without a count. Without sharing, each instance has a
    copy of the weights.

    Raises `ConfigError` for an unknown ``isolation``."""
    parameters = config.parameters
    configured = (
        parameters["ENABLE_WEIGHT_SHARING"].string_value.lower() if "ENABLE_WEIGHT_SHARING" in parameters else ""
    )
    is_trusted = "trust" in parameters and parameters["trust"].string_value.lower() == "true"
    shares = _can_share(config, is_trusted) and configured != "false"
    return SHARING_INSTANCES if shares and read_isolation(parameters) != "process" else 1


def shares_weights(model: Model) -> bool:
    """True if the instances of ``model`` on a device share one module: as configured, by default if it is safe."""
    configured: bool | None = model.parameters.enable_weight_sharing
    if configured is not None:
        return configured
    return model.device.kind == "cpu" and _can_share(model.config, model.parameters.trust)


def needs_lock(model: Model, changes: bool) -> bool:
    """True if executions of ``model`` must run one at a time: it ``changes`` state that the next one reads, such as a
    counter.

    False if the config declares that instances may share that state.
    """
    is_default = model.parameters.enable_weight_sharing is None
    return is_default and changes and shares_weights(model) and instances_of(model.config) > 1


def instances_of(config: ModelConfig) -> int:
    """Return the number of instances of every group; at least 1."""
    return sum(group.count or 1 for group in config.instance_group) or 1


def _can_share(config: ModelConfig, is_trusted: bool) -> bool:
    """True for files whose effects can be analysed: TorchScript, and programs without trust.

    False for models with sequences, whose state belongs to one instance.
    """
    is_trusted_program = is_trusted and is_pt2(config)
    return not config.runtime and not is_trusted_program and not config.HasField("sequence_batching")


def is_pt2(config: ModelConfig) -> bool:
    """True if the model's file is a ``.pt2``, of torch.export or AOTInductor."""
    if config.runtime:
        return False
    return config.default_model_filename.endswith(".pt2") or (
        not config.default_model_filename and config.platform == "torch_aoti"
    )
