"""The files of a model: ``model.json``, ``multi_lora.json``, or a directory of Hugging Face.

They are the files of Triton's vLLM backend, with two additions. A path in them may be relative to the version's
directory, and a version may hold the model itself instead of ``model.json``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from headrace import ConfigError, LoadError, Model, one_line
from headrace_llm import Task, read_json_file, shown

ENGINE_FILE: Final = "model.json"
ADAPTERS_FILE: Final = "multi_lora.json"
#: A settings file is written by hand: a larger one is something else.
MAX_BYTES: Final = 1 << 20
#: ``config.json`` of a model may list many labels.
_MAX_CONFIG_BYTES: Final = 64 << 20
#: Arguments that name code, which is imported, and ones that name places outside the model's directory.
_NAMES_CODE: Final = frozenset(
    ("logits_processors", "reasoning_parser_plugin", "scheduler_cls", "worker_cls", "worker_extension_cls")
)
_NAMES_PLACES: Final = frozenset(
    ("allowed_local_media_path", "allowed_media_domains", "download_dir", "hf_config_path", "model", "tokenizer")
)


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The arguments of vLLM's engine, ``members``.

    ``adapters`` maps the name of each LoRA adapter to its directory or its Hugging Face name, in the order of the file.
    ``task`` is that of the parameters, or else of the argument ``runner``.
    """

    members: Mapping[str, Any]
    adapters: Mapping[str, str]
    task: Task

    @property
    def world_size(self) -> int:
        """The GPUs of one engine."""
        return int(self.members.get("tensor_parallel_size", 1)) * int(self.members.get("pipeline_parallel_size", 1))


def read_engine_arguments(model: Model) -> EngineArguments:
    """Return the arguments in the files of ``model``. Reads no weights, and does not need vLLM.

    Raises `LoadError` with the file, and `ConfigError` with the member at fault.
    """
    if (model.path / ENGINE_FILE).exists() or model.config.default_model_filename:
        path = model.file(ENGINE_FILE)
        members = _read_object(path)
    elif (model.path / "config.json").exists():
        path, members = model.path / "config.json", {"model": "."}
    else:
        raise LoadError(
            f"model '{model.name}' version {model.version} has neither '{ENGINE_FILE}', the arguments of vLLM's "
            f"engine, nor 'config.json' of a Hugging Face model in '{model.path}'"
        )
    if type(members.get("model")) is not str or not members["model"]:
        raise ConfigError(f"'{path}' has no member 'model', the directory or the Hugging Face name of the model")
    if model.is_sent:
        _check_sent(model, path, members)
    if _is_true(members.get("trust_remote_code")) and not model.parameters.trust:
        raise ConfigError(
            f"'{path}' has trust_remote_code, which runs Python code of the model: set the parameter trust to true if "
            "you trust its author",
            field="parameters['trust']",
        )
    members["model"] = _place(model, members["model"])
    if type(members.get("tokenizer")) is str:
        members["tokenizer"] = _place(model, members["tokenizer"])
    if "disable_log_requests" in members:  # of older versions, in many repositories
        members.setdefault("enable_log_requests", not _is_true(members.pop("disable_log_requests")))
    members.setdefault("served_model_name", model.name)  # as a label of metrics
    task = _task(model, path, members)
    return EngineArguments(members, _read_adapters(model) if _is_true(members.get("enable_lora")) else {}, task)


def _task(model: Model, path: Path, members: dict[str, Any]) -> Task:
    """Return the task of ``model``. Sets the argument ``runner`` for the tasks beside generation."""
    runner = members.get("runner", "auto")
    task = Task(model.parameters.task or ("embedding" if runner == "pooling" else "generation"))
    if task is not Task.GENERATION:
        if runner not in ("auto", "pooling"):
            raise ConfigError(
                f"'{path}' has the runner {shown(runner)}, but the parameter task is {task.value}: leave runner out",
                field="parameters['task']",
            )
        members["runner"] = "pooling"
    elif runner == "pooling":
        raise ConfigError(
            f"'{path}' has the runner 'pooling', which generates no text: leave it out, or set the parameter task to "
            "embedding or reranking",
            field="parameters['task']",
        )
    return task


def vector_width(arguments: EngineArguments) -> int:
    """Return the length of the vectors of an embedding model whose directory is here; -1 if only vLLM knows it."""
    folder = Path(arguments.members["model"])
    path, modules = folder / "config.json", folder / "modules.json"
    if not path.is_file() or (modules.is_file() and "Dense" in str(read_json_file(modules, MAX_BYTES))):
        return -1
    width = read_json_file(path, _MAX_CONFIG_BYTES).get("hidden_size")
    return width if type(width) is int else -1


def check_known(model: Model, arguments: EngineArguments, known: Collection[str]) -> None:
    """Raise `ConfigError` with the nearest name if an argument is not ``known``, the arguments of vLLM's engine."""
    for name in arguments.members:
        if name not in known:
            near = get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(
                f"'{ENGINE_FILE}' of model '{model.name}' has the member '{one_line(name)}', which is no argument of "
                f"the installed vLLM{hint}"
            )


def _read_object(path: Path) -> dict[str, Any]:
    members = read_json_file(path, MAX_BYTES)
    if type(members) is not dict:
        raise LoadError(f"'{path}' must be a JSON object, got {shown(members)}")
    return members


def _read_adapters(model: Model) -> dict[str, str]:
    path = model.resource(ADAPTERS_FILE)
    members = _read_object(path)
    for name, value in members.items():
        if not name or type(value) is not str or not value:
            raise ConfigError(
                f"'{path}' must map names of adapters to directories, got '{one_line(name)}': {shown(value)}"
            )
        if model.is_sent:
            _check_inside(model, path, name, value)
    return {name: _place(model, value) for name, value in members.items()}


def _place(model: Model, value: str) -> str:
    """Return ``value`` as an absolute path if the version's directory has it; else it is absolute, or a name of Hugging
    Face."""
    inside = model.path / value
    return str(inside.absolute()) if inside.exists() else value


def _check_sent(model: Model, path: Path, members: Mapping[str, Any]) -> None:
    for name in sorted(_NAMES_CODE & members.keys()):
        model.refuse_if_sent(f"'{name}' in '{path.name}'")
    for name in sorted(_NAMES_PLACES & members.keys()):
        _check_inside(model, path, name, str(members[name]))


def _check_inside(model: Model, path: Path, name: str, value: str) -> None:
    """Raise `ConfigError` if ``value``, which came with a load request, is not in the version's directory."""
    inside = (model.path / value).resolve()
    if not (inside.exists() and inside.is_relative_to(model.path.resolve())):
        model.refuse_if_sent(f"'{name}' in '{path.name}', which is outside the version's directory,")


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"
