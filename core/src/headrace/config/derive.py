"""Derives missing fields of a config from the files in the model's directory, and fills in defaults.

Source: docs/spec/behaviours.md section 4.3. Applies to strict configs, too. Never opens a model file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field
from posixpath import splitext

from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.padding import PADDING, PaddingRules
from headrace.config.parameters import SCHEDULER
from headrace.config.path_checks import one_line
from headrace.errors import ConfigError
from headrace.messages.spec import Spec


@dataclass(frozen=True, slots=True)
class _Rule:
    """The name or pattern of a model file, and the backend and platform that follow from it."""

    filename: str
    backend: str
    platform: str = ""
    may_be_file: bool = True
    may_be_directory: bool = False

    def agrees(self, config: ModelConfig) -> bool:
        """True if ``config`` does not set another backend, platform or file name."""
        return (
            config.backend in ("", self.backend)
            and config.platform in ("", self.platform)
            and (not config.default_model_filename or fnmatch.fnmatchcase(config.default_model_filename, self.filename))
        )

    def is_in(self, folder: _Folder) -> bool:
        matches = (folder.names[name] for name in fnmatch.filter(folder.names, self.filename))
        return any(self.may_be_directory if is_directory else self.may_be_file for is_directory in matches)


#: In Triton's order of precedence.
_RULES = (
    _Rule("model.savedmodel", "tensorflow", "tensorflow_savedmodel", may_be_file=False, may_be_directory=True),
    _Rule("model.graphdef", "tensorflow", "tensorflow_graphdef"),
    _Rule("model.plan", "tensorrt", "tensorrt_plan"),
    _Rule("model.onnx", "onnxruntime", "onnxruntime_onnx", may_be_directory=True),
    _Rule("model.xml", "openvino"),
    _Rule("model.pt", "pytorch", "pytorch_libtorch"),
    _Rule("model.pt2", "pytorch", "torch_aoti"),
    _Rule("model.py", "python"),
    _Rule("*.gguf", "llamacpp"),
)

#: An old platform name. It implies the backend pytorch, although that does not list it as a platform.
_LIBTORCH = "libtorch"
_DEFAULT_IDLE_US = 1_000_000


def derive(config: ModelConfig, name: str, files: Iterable[str], *, needs_backend: bool = True) -> None:
    """Fill in name, backend, platform, file name and defaults of ``config``, in place.

    ``files`` are the paths below the directory of the model ``name``; one that ends with ``/`` is a directory. Raises
    `ConfigError` if the model needs a backend, and none follows from the config, the files or the name.
    """
    config.name = config.name or name
    if config.HasField("ensemble_scheduling") and not config.backend:
        config.platform = config.platform or "ensemble"
    if config.platform != "ensemble":
        _derive_backend(config, _first_folder(files), needs_backend)
    _fill_defaults(config)


@dataclass(frozen=True, slots=True)
class _Folder:
    """A subdirectory of a model. ``names`` maps each entry to True if it is a directory."""

    name: str
    names: dict[str, bool] = field(default_factory=dict)


def _first_folder(files: Iterable[str]) -> _Folder | None:
    """Return the first subdirectory by name, the only one that is used. Hidden ones are ignored."""
    paths = [path.split("/") for path in files if "/" in path and not path.startswith(".")]
    if not paths:
        return None
    folder = _Folder(min(path[0] for path in paths))
    for first, child, *rest in paths:
        if first == folder.name and child:
            folder.names[child] = folder.names.get(child, False) or bool(rest)
    return folder


def _derive_backend(config: ModelConfig, folder: _Folder | None, needs_backend: bool) -> None:
    if config.platform == _LIBTORCH:
        config.backend = config.backend or "pytorch"
    rule = _find_rule(config, folder)
    if rule is not None:
        config.backend, config.platform = rule.backend, rule.platform
        if config.runtime != "model.py" and "*" not in rule.filename:
            config.default_model_filename = config.default_model_filename or rule.filename
    elif config.platform and not config.backend:
        config.backend = _backend_beside_platform(config)
    elif needs_backend and not (config.backend or config.platform or config.default_model_filename):
        _derive_from_name(config, folder)


def _find_rule(config: ModelConfig, folder: _Folder | None) -> _Rule | None:
    """Return the rule of a file that is in the first version directory, or else the first rule that fits the config, if
    it sets any of the fields; None if there is none.

    A file name that no rule has does not imply a backend. It only counts if the config sets no backend or platform.
    """
    hints = ModelConfig(backend=config.backend, platform=config.platform)
    if config.default_model_filename in {rule.filename for rule in _RULES} or not (config.backend or config.platform):
        hints.default_model_filename = config.default_model_filename
    fitting = [rule for rule in _RULES if rule.agrees(hints)]
    present = [rule for rule in fitting if folder is not None and rule.is_in(folder)]
    return next(iter(present or (fitting if hints != ModelConfig() else [])), None)


def _backend_beside_platform(config: ModelConfig) -> str:
    """Return the backend that Triton derives from a platform and a file name that do not fit together; empty for none.

    Validation then refuses the pair, unless the backend accepts any platform.
    """
    fitting = (
        rule.backend
        for rule in _RULES
        if rule.platform == config.platform
        or (rule.filename == config.default_model_filename and rule.backend != "tensorflow")
    )
    return next(fitting, "")


def _derive_from_name(config: ModelConfig, folder: _Folder | None) -> None:
    """Derive the backend from a model name of the form ``model.<backend>``, if no field and no file gives one."""
    _, _, backend = config.name.partition(".")
    if not backend and SCHEDULER in config.parameters:
        scheduler = config.parameters[SCHEDULER].string_value
        raise ConfigError(
            f"model '{config.name}' has no backend, and its scheduler '{scheduler}' needs instances to run on: name a "
            "'backend'",
            field="backend",
        )
    if not backend:
        raise ConfigError(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            f"configuration. Expected model name of the form 'model.<backend_name>'. {_found_in(folder, config.name)}"
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def _found_in(folder: _Folder | None, model: str) -> str:
    """Return a sentence about the files in the directory of ``model``, which has no known model file."""
    known = ", ".join(rule.filename for rule in _RULES)
    if folder is None and model.isdecimal():
        return f"'{model}' is the name of a version: perhaps the repository is the directory above"
    if folder is None:
        return f"It has no version directory with one of {known}"
    if folder.names.get("config.pbtxt") is False:
        return f"It holds a model, '{one_line(folder.name)}': perhaps it is the repository"
    names = sorted(folder.names)
    shown = ", ".join(f"'{one_line(name)}'" for name in names[:4]) + (f" and {len(names) - 4} more" * (len(names) > 4))
    found_in = f"Its directory '{folder.name}' has {shown or 'nothing'}, and none of {known}"
    near = [rule for name in names for rule in _RULES if splitext(name)[1] == splitext(rule.filename)[1]]
    return f"{found_in}; rename '{one_line(names[0])}' to {near[0].filename}" if near and len(names) == 1 else found_in


def _fill_defaults(config: ModelConfig) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    fill_batching(config)
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _DEFAULT_IDLE_US
    if config.platform != "ensemble":
        optimization = config.optimization
        for field in ("input_pinned_memory", "output_pinned_memory"):
            if not optimization.HasField(field):
                getattr(optimization, field).enable = True


def fill_batching(config: ModelConfig) -> None:
    """Fill in the default preferred batch sizes. Called again after auto-completion has set ``max_batch_size``."""
    if config.max_batch_size > 0:
        if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
        if config.sequence_batching.HasField("oldest"):
            oldest = config.sequence_batching.oldest
            if not oldest.preferred_batch_size:
                oldest.preferred_batch_size.append(config.max_batch_size)


def padding_inputs(config: ModelConfig) -> list[Spec]:
    """Return the inputs that the server makes by the parameter ``padding``: lengths and masks, with the batch axis.

    Raises `ConfigError` if the parameter cannot be read.
    """
    if PADDING not in config.parameters:
        return []
    rules = PaddingRules.from_json(config_to_json(config))
    pads = rules.pads if rules else ()
    made = [each for pad in pads for each in ((pad.length, (-1,)), (pad.mask, (-1, -1)))]
    return [Spec(tensor.name, tensor.datatype, dims) for tensor, dims in made if tensor]
