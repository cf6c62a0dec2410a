"""From ``config.pbtxt`` to a complete and valid config, in two steps.

`read` does what needs no engine: parse, derive. `complete` asks the backend for what is still
missing, unless auto-completion is off, and validates the result (behaviours.md sections 4.3, 4.4).
"""

from __future__ import annotations

from pathlib import Path

from penstock.backends.base import Backend, Model
from penstock.config.derive import derive, fill_batching
from penstock.config.model_config_pb2 import ModelConfig
from penstock.config.options import ServerOptions
from penstock.config.parse import find_config, read_config
from penstock.config.validation import ensembles, validate
from penstock.config.validation import model as whole_model
from penstock.errors import ConfigError, Unsupported
from penstock.workers.devices import available_gpus, fill_groups

#: What a config may ask for that is not built yet; to ignore it would give wrong answers.
_NOT_BUILT = {
    "sequence_batching": "the sequence batcher",
    "ensemble_scheduling": "ensembles",
    "batch_input": "batch inputs",
    "batch_output": "batch outputs",
    "model_repository_agents": "repository agents",
}


def read(model_path: Path, options: ServerOptions) -> ModelConfig:
    """The config of the model at ``model_path``, derived but not completed. Raises `ConfigError`.

    Raises `Unsupported` for a feature that is not built yet.
    """
    path = find_config(model_path, options.model_config_name)
    if path is None and options.disable_auto_complete_config:
        raise ConfigError(f"{model_path / 'config.pbtxt'}: no such file, and auto-completion is off")
    config = read_config(path) if path is not None else ModelConfig()
    derive(config, model_path)
    for field, feature in _NOT_BUILT.items():
        if getattr(config, field) if field.startswith("batch") else config.HasField(field):  # type: ignore[arg-type]
            raise Unsupported(f"model '{config.name}' needs {feature} ('{field}'), which this version does not have")
    # These choose the backend, so they are judged before one is looked for.
    for problem in (*whole_model.check(config), *ensembles.check(config)):
        raise ConfigError(problem.message, problem.code)
    return config


def complete(model: Model, backend: Backend, options: ServerOptions) -> None:
    """Complete ``model.config`` in place and validate it. Raises `ConfigError` or `LoadError`."""
    config = model.config
    if not options.disable_auto_complete_config:
        scheduling = config.WhichOneof("scheduling_choice")
        backend.complete_config(model)
        if scheduling is not None and config.WhichOneof("scheduling_choice") != scheduling:
            raise ConfigError(
                f"backend '{backend.name}' changed the scheduling choice of model '{model.name}' from {scheduling} to "
                f"{config.WhichOneof('scheduling_choice')}"
            )
        fill_batching(config)
    gpus = available_gpus()
    validate(config, gpus=gpus, files=model.path.parent)
    fill_groups(config, backend, gpus)
