"""TorchScript modules: opened from their file, with the arguments and results of their ``forward``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import HeadraceError, LoadError, Model, in_memory, one_line
from headrace_torch import pickle_check, script_check, unsafe_operators
from headrace_torch.instance import Forward
from headrace_torch.parameters import HOW_TO_TRUST, is_trusted
from headrace_torch.script_effects import effects_of
from headrace_torch.tensor_conversion import state_memory
from headrace_torch.torch_process import first_line

#: Pickles in a TorchScript file that have tensors, and the folders that their memory is in.
_TENSORS = ("data", "constants")


def open_script(torch: Any, model: Model, device: str) -> Forward:
    """Return the module of the file on ``device``. On a device of kind ``model``, it is where it was when it was saved.

    Raises `LoadError` naming the file at fault."""
    path = model.file("model.pt")
    try:
        with in_memory(path) as opened, warnings.catch_warnings():
            _check(torch, model, path, opened)
            warnings.simplefilter("ignore", DeprecationWarning)  # advice to export, for the file's author
            module = _load(torch, model, path, opened, None if model.device.kind == "model" else torch.device(device))
    except HeadraceError:
        raise
    except Exception as error:  # pybind has its own exception classes
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
        state_memory=state_memory(module),
        changes=effects.changes,
        can_warm_up=not (effects.changes or effects.is_random or effects.loops),
        any_thread=not effects.repeats,
    )


def _load(torch: Any, model: Model, path: Path, opened: str, place: Any) -> Any:
    """Return the result of ``torch.jit.load``. Unless the model is trusted, its unwritten memory is zeroed."""
    unit = torch._C.CompilationUnit()
    module = torch._C.import_ir_module(unit, opened, place, {}, False)
    if not is_trusted(model):
        functions = unit.get_functions()
        if found := unsafe_operators.reason_for_trust(functions):
            raise _trust_required(model, path, found)
        unsafe_operators.zero(functions)
    return torch.jit._recursive.wrap_cpp_module(module)


def _check(torch: Any, model: Model, path: Path, opened: str) -> None:
    try:
        reader = torch._C.PyTorchFileReader(opened)
        records = reader.get_all_records()
        damage = _damage(torch, reader)
        found = "" if is_trusted(model) else script_check.reason_for_trust(reader)
    except HeadraceError:
        raise
    except Exception as error:  # pybind has its own exception classes
        raise _failure(model, path, error) from error
    if "constants.pkl" not in records:
        raise LoadError(
            f"failed to load model '{model.name}': '{path}' is not TorchScript; it holds {', '.join(records[:3])}"
        )
    if damage:
        raise LoadError(f"failed to load model '{model.name}': '{path}' is damaged at {damage}")
    if found:
        raise _trust_required(model, path, found)


def _damage(torch: Any, reader: Any) -> str:
    for name in reader.get_all_records():
        if name.endswith(".pkl") and (found := pickle_check.damage(reader.get_record(name))):
            return f"'{one_line(name)}': {found}"
    for folder in _TENSORS:
        if reader.has_record(f"{folder}.pkl") and (found := pickle_check.oversized(torch, reader, folder)):
            return f"'{folder}.pkl': {found}"
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


def _trust_required(model: Model, path: Path, found: str) -> LoadError:
    return LoadError(f"failed to load model '{model.name}': '{path}' may do more than compute: {found}; {HOW_TO_TRUST}")


def _failure(model: Model, path: Path, error: Exception) -> LoadError:
    return LoadError(f"failed to load model '{model.name}': '{path}': {first_line(error)}")
