"""TorchScript modules: opened from their file, and what their ``forward`` takes and gives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import LoadError, Model
from headrace_torch import script_code
from headrace_torch.torch_process import first_line


@dataclass(frozen=True, slots=True)
class Script:
    """A TorchScript module on its device. ``arguments`` are forward's without ``self``, ``required`` those without a
    default. ``takes_dict``: its only argument is a dictionary of tensors. ``writes``: it may write to its inputs."""

    module: Any
    arguments: Sequence[str]
    required: Sequence[str]
    takes_dict: bool
    writes: bool


def open_script(torch: Any, model: Model, device: str) -> Script:
    """Raises `LoadError` naming the file at fault."""
    path = model.file("model.pt")
    _check(torch, model, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's advice to export, for who made the file
            module = torch.jit.load(str(path), map_location=device)
    except Exception as error:  # pybind raises classes of its own
        raise _failure(model, path, error) from error
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if not hasattr(module, "forward"):
        raise LoadError(f"failed to load model '{model.name}': '{path}' has no method 'forward'")
    declared = module.forward.schema.arguments[1:]
    return Script(
        module,
        [argument.name for argument in declared],
        [argument.name for argument in declared if not argument.has_default_value()],
        _takes_dict(model, declared),
        _writes(torch, module),
    )


def _check(torch: Any, model: Model, path: Path) -> None:
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        records = reader.get_all_records()
        found = "" if model.parameters.trust else script_code.finding(reader)
    except Exception as error:  # pybind raises classes of its own
        raise _failure(model, path, error) from error
    if "constants.pkl" not in records:
        raise LoadError(
            f"failed to load model '{model.name}': '{path}' is not TorchScript; it holds {', '.join(records[:3])}"
        )
    if found:
        raise LoadError(
            f"failed to load model '{model.name}': '{path}' may do more than compute: {found}. If you trust who made "
            "it, set the model's parameter 'trust' to 'true'"
        )


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


def _writes(torch: Any, module: Any) -> bool:
    """Whether anything is written in place that may be an input; what the graph does not show may be."""
    try:
        graph = module.inlined_graph
        aliases = graph.alias_db()
        return any(aliases.has_writers(value) for value in list(graph.inputs())[1:])
    except Exception:  # whatever the engine cannot analyse
        return True


def _failure(model: Model, path: Path, error: Exception) -> LoadError:
    return LoadError(f"failed to load model '{model.name}': '{path}': {first_line(error)}")
