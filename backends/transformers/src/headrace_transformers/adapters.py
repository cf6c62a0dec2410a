"""LoRA adapters beside a model: the folders of ``adapters/`` in its version, in the form of the library PEFT.

Each adapter is a copy of the model's modules that shares its weights, so requests with and without it run at once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headrace import Code, LoadError, Model, one_line
from headrace_llm import Task, read_json_file
from headrace_transformers.weight_files import tensor_sizes

FOLDER: Final = "adapters"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_ADAPTERS = 1 << 20, 256

#: Members of ``adapter_config.json`` that say how an adapter computes.
_MEMBERS: Final = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern", "modules_to_save", "trainable_token_indices", "ensure_weight_tying",
    "bias", "lora_bias", "fan_in_fan_out", "use_rslora", "use_dora",
)  # fmt: skip
#: Members about the training, or where files came from.
_IGNORED: Final = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
#: Values of ``init_lora_weights`` that leave the weights of the model as they are.
_KEEPS_MODEL: Final = (None, True, False, "gaussian", "orthogonal")


def adapter_folders(model: Model, folder: Path, task: Task) -> Mapping[str, Path]:
    """Return the adapters beside the model in ``folder``, by name. Hidden folders are none. Raises `LoadError`."""
    if not (folder / FOLDER).is_dir():
        return {}
    found = {path.name: path for path in sorted((folder / FOLDER).iterdir()) if path.is_dir() and path.name[0] != "."}
    if found and task is not Task.GENERATION:
        raise LoadError(f"{folder / FOLDER}: adapters are for models that generate text, this is one for {task.value}")
    if len(found) > MAX_ADAPTERS:
        raise LoadError(f"model '{model.name}' has {len(found)} adapters, the limit is {MAX_ADAPTERS}")
    return found


def open_adapters(base: Any, folders: Mapping[str, Path]) -> Mapping[str, Any]:
    """Return a model for each of ``folders``: ``base`` with the adapter. They share the weights of ``base``.

    Raises `LoadError` with the folder and what is wrong.
    """
    if not folders:
        return {}
    try:
        import peft
    except ImportError as error:
        raise LoadError(
            f"{next(iter(folders.values()))} is an adapter, which needs the package peft ({error}); run: pip install "
            "'headrace-transformers[adapters]'",
            Code.UNSUPPORTED,
        ) from error
    opened = {}
    for name, folder in folders.items():
        config = _read_config(folder)
        weights = _read_weights(folder, config, base)
        try:
            opened[name] = _add(peft, base, config, weights)
        except LoadError:
            raise
        except Exception as error:
            text = one_line(" ".join(str(error).split()))[:500]
            raise LoadError(f"unable to load the adapter in {folder}: {type(error).__name__}: {text}") from error
    return opened


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the members of the adapter's config that are for PEFT."""
    path = folder / CONFIG
    if not path.exists():
        raise LoadError(f"{folder} has no {CONFIG}: expected an adapter that PEFT has saved")
    config = read_json_file(path, MAX_CONFIG_BYTES)
    if type(config) is not dict:
        raise LoadError(f"{path} is not the config of an adapter: expected a JSON object")
    if config.get("peft_type") != "LORA":
        kind = one_line(str(config.get("peft_type")))[:50]
        raise LoadError(f"{path}: peft_type is '{kind}', expected LORA", Code.UNSUPPORTED)
    if not any(config.get("init_lora_weights") is each for each in _KEEPS_MODEL[:3]) and (
        config["init_lora_weights"] not in _KEEPS_MODEL[3:]
    ):
        how = one_line(str(config["init_lora_weights"]))[:50]
        raise LoadError(
            f"{path}: init_lora_weights is '{how}', which changes the weights of the model: convert the adapter to a "
            "plain one with PEFT's path_initial_model_for_weight_conversion",
            Code.UNSUPPORTED,
        )
    for name, value in config.items():
        if value and name not in (*_MEMBERS, *_IGNORED):
            raise LoadError(f"{path}: '{one_line(name)[:50]}' is not supported", Code.UNSUPPORTED)
    return {name: config[name] for name in _MEMBERS if name in config}


def _read_weights(folder: Path, config: Mapping[str, Any], base: Any) -> Mapping[str, Any]:
    """Return the tensors of the adapter by the names of the model's modules, in its type and on its device."""
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.exists():
        raise LoadError(f"{folder} has no {WEIGHTS}: other forms, such as pickled weights, are not read")
    largest = max(tensor_sizes(path), default=0)
    ranks = config.get("rank_pattern") or {}
    for rank in (config.get("r", 8), *(ranks.values() if type(ranks) is dict else (None,))):
        if type(rank) is not int or not 0 < rank <= largest:
            given = one_line(str(rank))[:50]
            raise LoadError(f"{folder / CONFIG}: the rank {given} does not fit the tensors of {WEIGHTS}")
    try:
        tensors = load_file(path)
    except Exception as error:
        raise LoadError(f"unable to read {path}: {one_line(str(error))[:300]}") from error
    return {
        name.removeprefix("base_model.model."): each.to(base.device, base.dtype if each.is_floating_point() else None)
        for name, each in tensors.items()
    }


def _add(peft: Any, base: Any, config: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    shared = {id(each): each for each in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    peft.inject_adapter_in_model(
        peft.LoraConfig(**config, inference_mode=True), model, adapter_name="default", low_cpu_mem_usage=True
    )
    found = peft.set_peft_model_state_dict(model, dict(weights), adapter_name="default", low_cpu_mem_usage=True)
    for name in found.unexpected_keys:
        raise LoadError(f"the tensor '{one_line(name)[:200]}' of the adapter has no place in {type(model).__name__}")
    for name, each in model.named_parameters():
        if each.device.type == "meta":
            raise LoadError(f"the adapter has no tensor for '{name}', which its config names")
    return model.eval()
