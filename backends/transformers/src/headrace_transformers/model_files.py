"""The files of a model: found, and checked before transformers reads them.

transformers builds the model of ``config.json``, however large, and fills missing weights with random numbers. So the
file is compared with the weights that are there. Nothing is imported for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import Code, LoadError, Model, one_line, why_path_leaves
from headrace_llm import Task, read_json_file
from headrace_transformers.parameters import HOW_TO_TRUST, is_trusted
from headrace_transformers.weight_files import MAX_JSON_BYTES, check_files, tensor_sizes

MAX_CONFIG_BYTES = 8 << 20
#: Names the files of weights of a large model.
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HuggingFaceFiles:
    """The files of one version: ``folder``, and in it ``gguf``, a file name, or else ``config`` and safetensors."""

    folder: Path
    gguf: str
    config: Mapping[str, Any]
    task: Task

    @property
    def has_vision(self) -> bool:
        """True if the architecture of the model has a part that reads images, and writes text."""
        return self.task is Task.GENERATION and type(self.config.get("vision_config")) is dict

    @property
    def reads_images(self) -> bool:
        """True if there are files for that part, too: the settings of a processor."""
        names = ("processor_config.json", "preprocessor_config.json")
        return self.has_vision and any((self.folder / name).is_file() for name in names)

    def json(self, name: str) -> Any:
        """Return the JSON file ``name`` of the folder; None if there is none. Raises `LoadError`."""
        path = self.folder / name
        most = MAX_JSON_BYTES if name == INDEX else MAX_CONFIG_BYTES
        return read_json_file(path, most) if path.is_file() else None


def find_files(model: Model) -> HuggingFaceFiles:
    """Return the files of ``model``. Raises `LoadError` with the file, or `ConfigError`."""
    asked = model.parameters.folder.rstrip("/")
    prefix = f"{asked}/" if asked else ""
    if model.config.default_model_filename:
        path = model.resource(prefix + model.config.default_model_filename)
        return HuggingFaceFiles(path.parent, path.name, {}, _task_of(model, {}))
    gguf = _only_gguf(model.path / asked) if not why_path_leaves(asked, levels=1) else ""
    if gguf:
        return HuggingFaceFiles(model.resource(prefix + gguf).parent, gguf, {}, _task_of(model, {}))
    path = model.resource(f"{prefix}config.json")
    config = read_json_file(path, MAX_CONFIG_BYTES)
    if type(config) is not dict:
        raise LoadError(f"{path} is not the config of a model: expected a JSON object")
    if (path.parent / "adapter_config.json").exists():
        raise LoadError(
            f"{path.parent} has an adapter (adapter_config.json) beside the model: move it to a folder of adapters/",
            Code.UNSUPPORTED,
        )
    return HuggingFaceFiles(path.parent, "", config, _task_of(model, config))


def _only_gguf(folder: Path) -> str:
    if (folder / "config.json").exists() or not folder.is_dir():
        return ""
    found = [path.name for path in folder.glob("*.gguf")]
    return found[0] if len(found) == 1 else ""


#: The ends of names of architectures, and their tasks. Without one of them a model is an encoder: embedding.
_ENDS = (
    ("ForCausalLM", Task.GENERATION),
    ("LMHeadModel", Task.GENERATION),
    ("ForConditionalGeneration", Task.GENERATION),
    ("ForSequenceClassification", Task.CLASSIFICATION),
    ("ForSpeechSeq2Seq", Task.TRANSCRIPTION),
)
_SPEECH = ("whisper", "speech", "moonshine")


def _task_of(model: Model, config: Mapping[str, Any]) -> Task:
    if model.parameters.task:
        return Task(model.parameters.task)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not config or not name:
        return Task.GENERATION if not config else Task.EMBEDDING
    task = next((task for end, task in _ENDS if name.endswith(end)), Task.EMBEDDING)
    if task is Task.GENERATION and name.lower().startswith(_SPEECH):
        return Task.TRANSCRIPTION
    return Task.RERANKING if task is Task.CLASSIFICATION and number_of_labels(config) == 1 else task


def number_of_labels(config: Mapping[str, Any]) -> int:
    """Return how many labels ``config.json`` has; transformers' default is 2."""
    labels = config.get("id2label")
    if isinstance(labels, Mapping):
        return len(labels)
    given = config.get("num_labels")
    return given if type(given) is int else 2


#: The ends of names of numbers in ``config.json`` that are for modules: each has a tensor of its own, or more.
_REPEATED = ("layers", "layer", "experts", "blocks", "stages")


def check_weights(model: Model, files: HuggingFaceFiles) -> int:
    """Check the files of the model; return how many numbers its weights have, 0 if it is not known.

    Raises `LoadError` with the file if weights are missing, truncated, pickled or outside the directory, and for what
    `check_files` refuses. Raises it, too, if the config has more layers than there are tensors.
    """
    if files.gguf:
        return 0
    check_files(files.folder)
    paths = list(_weight_files(model, files))
    if not paths:
        return 0
    shapes = [shape for path in paths for shape in tensor_sizes(path)]
    for name, value in _integers(files.config):
        if name.rpartition("_")[2] in _REPEATED and not name.startswith("max_") and value > max(1000, len(shapes)):
            has = f"its weights have {len(shapes)} tensors"
            raise LoadError(f"{files.folder / 'config.json'}: {name} is {value}, but {has}")
        if value > 2**53:
            raise LoadError(f"{files.folder / 'config.json'}: {name} is {value}, the limit is 2^53")
    return sum(shapes)


def _weight_files(model: Model, files: HuggingFaceFiles) -> Iterator[Path]:
    index = files.json(INDEX)
    if index is not None:
        names = index.get("weight_map") if type(index) is dict else None
        if type(names) is not dict or not names or not all(type(name) is str for name in names.values()):
            raise LoadError(f"{files.folder / INDEX} has no object weight_map of file names")
        for name in sorted(set(names.values())):
            if why_path_leaves(name) or not name.endswith(".safetensors"):
                raise LoadError(
                    f"{files.folder / INDEX} names '{one_line(name)}', expected a file of "
                    "the same directory that ends in .safetensors"
                )
            yield files.folder / name
        return
    found = sorted(files.folder.glob("*.safetensors"))
    yield from found
    if found:
        return
    pickled = next((path.name for path in sorted(files.folder.glob("*.bin"))), "")
    if pickled and not is_trusted(model):
        raise LoadError(
            f"{files.folder / pickled}: pickled weights may run code when they are read: save the model as "
            f"safetensors, or, {HOW_TO_TRUST}"
        )
    if not pickled:
        raise LoadError(f"no file of weights (*.safetensors) in {files.folder} for model '{model.name}'")


def _integers(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of ``config`` with their names, those of configs inside it, too."""
    for name, value in config.items():
        if type(value) is int:
            yield name, value
        elif type(value) is dict and depth < 4:
            yield from _integers(value, depth + 1)
