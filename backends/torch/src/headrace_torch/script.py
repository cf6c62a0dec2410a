"""TorchScript modules: opened from their file, and what their ``forward`` takes and gives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import HeadraceError, LoadError, Model, in_memory, one_line
from headrace_torch import pickle_check, script_code
from headrace_torch.conversion import kept_memory
from headrace_torch.instance import Forward
from headrace_torch.parameters import HOW_TO_TRUST, is_trusted
from headrace_torch.script_effects import effects_of
from headrace_torch.torch_process import first_line


def open_script(torch: Any, model: Model, device: str) -> Forward:
    """The module of the file on ``device``; on a device of kind ``model``, where it was when it was saved.

    Raises `LoadError` naming the file at fault."""
    path = model.file("model.pt")
    try:
        with in_memory(path) as opened, warnings.catch_warnings():
            _check(torch, model, path, opened)
            warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's advice to export, for who made the file
            module = torch.jit.load(opened, map_location=None if model.device.kind == "model" else device)
    except HeadraceError:
        raise
    except Exception as error:  # pybind raises classes of its own
        raise _failure(model, path, error) from error
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if not hasattr(module, "forward"):
        raise LoadError(f"failed to load model '{model.name}': '{path}' has no method 'forward'")
    declared = module.forward.schema.arguments[1:]
    effects = effects_of(torch, module)
    return Forward(
        run=module.forward,
        device=device,
        arguments=[argument.name for argument in declared],
        required=[argument.name for argument in declared if not argument.has_default_value()],
        takes_dict=_takes_dict(model, declared),
        writes=effects.writes,
        kept=kept_memory(module),
        changes=effects.changes,
        can_rehearse=not (effects.changes or effects.is_random or effects.loops),
        any_thread=not effects.repeats,
    )


def _check(torch: Any, model: Model, path: Path, opened: str) -> None:
    """Raise `LoadError` unless ``path``, which is ``opened`` by another name, is TorchScript that may be run."""
    try:
        reader = torch._C.PyTorchFileReader(opened)
        records = reader.get_all_records()
        damage = _damage(reader)
        found = "" if is_trusted(model) else script_code.finding(reader)
    except HeadraceError:
        raise
    except Exception as error:  # pybind raises classes of its own
        raise _failure(model, path, error) from error
    if "constants.pkl" not in records:
        raise LoadError(
            f"failed to load model '{model.name}': '{path}' is not TorchScript; it holds {', '.join(records[:3])}"
        )
    if damage:
        raise LoadError(f"failed to load model '{model.name}': '{path}' is damaged at {damage}")
    if found:
        raise LoadError(
            f"failed to load model '{model.name}': '{path}' may do more than compute: {found}; {HOW_TO_TRUST}"
        )


def _damage(reader: Any) -> str:
    for name in reader.get_all_records():
        if name.endswith(".pkl") and (found := pickle_check.damage(reader.get_record(name))):
            return f"'{one_line(name)}': {found}"
    return ""


def _takes_dict(model: Model, declared: Sequence[Any]) -> bool:
    dicts = [argument for argument in declared if argument.type.kind() == "DictType"]
    if len(dicts) > 1:
        raise LoadError(
            f"failed to load model '{model.name}': Multiple inputs of kind DictType were detected. Only a single input "
            "of type Dict(str, Tensor) is supported."
        )
    if dicts and (len(declared) > 1 or dicts[0].type.annotation_str != "Dict[str, Tensor]"):
        raise LoadError(
            f"failed to load model '{model.name}': forward takes {', '.join(str(a.type) for a in declared)}, but a "
            "dictionary must be its only argument, and Dict(str, Tensor)"
        )
    return bool(dicts)


def _failure(model: Model, path: Path, error: Exception) -> LoadError:
    return LoadError(f"failed to load model '{model.name}': '{path}': {first_line(error)}")
