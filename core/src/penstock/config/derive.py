"""What a config leaves to be read off the directory, and the defaults that are always filled in.

Source: behaviours.md section 4.3. Happens with strict configs too; never looks into model files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.config.model_config_pb2 import ModelConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Rule:
    """A file name that gives a model's kind away."""

    filename: str
    backend: str
    platform: str = ""
    is_directory: bool | None = None

    def matches(self, path: Path) -> bool:
        found = path / self.filename
        return found.exists() and self.is_directory in (None, found.is_dir())


#: In Triton's order of precedence.
_RULES = (
    _Rule("model.savedmodel", "tensorflow", "tensorflow_savedmodel", True),
    _Rule("model.graphdef", "tensorflow", "tensorflow_graphdef", False),
    _Rule("model.plan", "tensorrt", "tensorrt_plan"),
    _Rule("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    _Rule("model.xml", "openvino"),
    _Rule("model.pt", "pytorch", "pytorch_libtorch", False),
    _Rule("model.pt2", "pytorch", "torch_aoti"),
    _Rule("model.py", "python"),
)

_BY_PLATFORM = {rule.platform: rule for rule in _RULES if rule.platform}
_BY_BACKEND = {rule.backend: rule for rule in reversed(_RULES)}
_DEFAULT_IDLE_US = 1_000_000


def derive(config: ModelConfig, model_path: Path) -> None:
    """Fill in name, backend, platform, file name and defaults of ``config``, in place.

    Raises `ConfigError` if the name contradicts the directory or no backend can be told.
    """
    _derive_name(config, model_path)
    if config.platform != "ensemble" and not config.HasField("ensemble_scheduling"):
        _derive_backend(config, model_path)
    elif not config.platform:
        config.platform = "ensemble"
    _fill_defaults(config)


def _derive_name(config: ModelConfig, model_path: Path) -> None:
    if not config.name:
        config.name = model_path.name
    elif config.name != model_path.name:
        raise ConfigError(
            f"unexpected directory name '{model_path.name}' for model '{config.name}', directory name must equal "
            "model name"
        )


def _derive_backend(config: ModelConfig, model_path: Path) -> None:
    rule = _BY_PLATFORM.get(config.platform)
    if rule is None and not config.backend and not config.platform:
        rule = _by_file(model_path)
        if rule is None:
            rule = _by_model_name(config)
    if rule is None:
        rule = _known_file(config, model_path)
    if rule is None:
        return
    config.backend = config.backend or rule.backend
    if config.backend == rule.backend:
        config.platform = config.platform or rule.platform
        config.default_model_filename = config.default_model_filename or rule.filename


def _by_file(model_path: Path) -> _Rule | None:
    """The first rule that fits the first subdirectory, by name."""
    folders = sorted(path for path in model_path.iterdir() if path.is_dir()) if model_path.is_dir() else []
    return next((rule for rule in _RULES if rule.matches(folders[0])), None) if folders else None


def _by_model_name(config: ModelConfig) -> _Rule | None:
    if config.default_model_filename:
        return None
    _, dot, backend = config.name.partition(".")
    if not dot or not backend:
        raise ConfigError(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'."
        )
    return _Rule(f"model.{backend}", backend)


def _known_file(config: ModelConfig, model_path: Path) -> _Rule | None:
    """For a backend that has several files, the one that is there; else its first."""
    found = _by_file(model_path)
    return found if found is not None and found.backend == config.backend else _BY_BACKEND.get(config.backend)


def _fill_defaults(config: ModelConfig) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    fill_batching(config)
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _DEFAULT_IDLE_US
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size > 0:
            batching.oldest.preferred_batch_size.append(config.max_batch_size)
    if config.platform != "ensemble":
        for memory in (config.optimization.input_pinned_memory, config.optimization.output_pinned_memory):
            memory.enable = True


def fill_batching(config: ModelConfig) -> None:
    """The default preferred size; again after auto-completion has set ``max_batch_size``."""
    if config.HasField("dynamic_batching") and config.max_batch_size > 0:
        batching = config.dynamic_batching
        if not batching.preferred_batch_size:
            batching.preferred_batch_size.append(config.max_batch_size)
