"""Modules written in Python: a class that extends ``torch.nn.Module`` in the version's ``model.py``.

The class is called without arguments, and its object gets the weights of the version, if there are any. The class is
the only one in the file that extends `torch.nn.Module`, needs no arguments and is not the base of another such class.
Of several, it is ``Model``. Source: docs/spec/behaviours.md section 10.3. Triton takes the first one in alphabetical
order, imported ones included.
"""

from __future__ import annotations

import inspect
import re
import traceback
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import HeadraceError, LoadError, Model, one_line
from headrace_engines import PrivateModules
from headrace_torch.instance import Forward
from headrace_torch.tensor_conversion import state_memory
from headrace_torch.torch_compile import compile_module, forget_compiled
from headrace_torch.torch_process import first_line
from headrace_torch.weights import load_weights

#: The value of ``runtime`` in a config that selects this, and the default name of the file.
RUNTIME = "model.py"
#: The name of the class to choose among several.
_PREFERRED = "Model"


def find_code(model: Model) -> Path | None:
    """Return the Python file of ``model``; None if its config has no ``runtime``, or if it has a TorchScript file only.

    Raises `LoadError` for another ``runtime``, or a missing file.
    """
    runtime = model.config.runtime
    if runtime and runtime.endswith(".py") and runtime != RUNTIME:
        raise LoadError(
            f"model '{model.name}': runtime is '{one_line(runtime)}', but backend 'pytorch' has only '{RUNTIME}'"
        )
    if runtime != RUNTIME:
        return None
    named = model.config.default_model_filename
    if named and not named.endswith(".py"):
        return None
    if not named and not (model.path / RUNTIME).exists() and (model.path / "model.pt").exists():
        return None
    return model.file(RUNTIME)


def open_eager(torch: Any, model: Model, file: Path, device: str, inputs: Sequence[str]) -> Forward:
    """Return the module of ``file`` on ``device``, with the config's ``inputs``. On a device of kind ``model``, the
    module chooses its own device, and inputs go to the device of its first parameter.

    Raises `LoadError` naming the file at fault, after removing the model's code."""
    modules = PrivateModules((file.parent, model.path, model.path.parent), {"torch"})
    try:
        return _open(torch, model, modules, file, device, inputs)
    except BaseException as error:
        modules.close()
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, HeadraceError):
            raise LoadError(
                f"failed to load model '{model.name}': '{file}': {error_text(error, modules.package)}"
            ) from error
        raise


def _open(torch: Any, model: Model, modules: PrivateModules, file: Path, device: str, inputs: Sequence[str]) -> Forward:
    chosen = _choose(torch, model, modules, file)
    module = chosen()
    load_weights(torch, model, file, module)
    if model.device.kind == "model":
        device = next((str(parameter.device) for parameter in module.parameters()), "cpu")
    else:
        module.to(device)
    module.eval()
    parameters, takes_any, takes_dict = _signature(model, module)
    by_place = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    arguments = by_place + [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    keywords_only = len(by_place) < len(arguments)
    if takes_any is inspect.Parameter.VAR_KEYWORD:
        arguments, keywords_only = [*arguments, *(name for name in inputs if name not in arguments)], True
    takes_any_number = takes_any is inspect.Parameter.VAR_POSITIONAL and not keywords_only
    run = compile_module(torch, model, module, device)
    is_compiled = run is not module

    def close() -> None:
        if is_compiled:
            forget_compiled(torch, modules)
        modules.close()

    return Forward(
        run=run,
        is_compiled=is_compiled,
        device=device,
        arguments=None if takes_any_number else arguments,
        required=[each.name for each in parameters if each.default is each.empty and not takes_any_number],
        keywords_only=keywords_only,
        takes_dict=takes_dict,
        state_memory=state_memory(module),
        explain=lambda error: error_text(error, modules.package),
        close=close,
    )


def _choose(torch: Any, model: Model, modules: PrivateModules, file: Path) -> type[Any]:
    """Return the class that is served. Raises `LoadError` if there is none, or more than one."""
    code = modules.load(file)
    classes = [value for value in vars(code).values() if isinstance(value, type) and issubclass(value, torch.nn.Module)]
    own = [each for each in classes if each.__module__ == code.__name__]
    own = list(dict.fromkeys(own or [each for each in classes if modules.has(each.__module__)]))
    ready = [each for each in own if _needs_nothing(each)]
    leaves = [each for each in ready if not any(other is not each and issubclass(other, each) for other in ready)]
    if len(leaves) > 1:
        leaves = [each for each in leaves if each.__name__ == _PREFERRED] or leaves
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        names = ", ".join(sorted(f"'{each.__name__}'" for each in leaves))
        problem = f"has {len(leaves)} classes that could be served, {names}: call one of them '{_PREFERRED}'"
    elif own:
        problem = f"has no class that can be made without arguments, only {', '.join(map(_shown, own))}"
    else:
        problem = "has no class that extends torch.nn.Module"
    raise LoadError(f"failed to load model '{model.name}': '{file}' {problem}")


def _needs_nothing(kind: type[Any]) -> bool:
    try:
        inspect.signature(kind).bind()
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _shown(kind: type[Any]) -> str:
    return f"'{kind.__name__}{inspect.signature(kind)}'"


_DICTIONARY = re.compile(r"(typing\.|t\.)?(Dict|dict|Mapping|OrderedDict)\b")


def _signature(model: Model, module: Any) -> tuple[list[inspect.Parameter], Any, bool]:
    """Return forward's named parameters, the kind of its variable ones, and True if it takes a dictionary."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = {each.kind for each in parameters}
    others = kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    named = [each for each in parameters if each.kind not in others]
    try:
        hints = typing.get_type_hints(module.forward)
    except Exception:  # evaluating the model's annotations may raise any exception
        hints = {}
    dictionaries = [each for each in named if _is_dictionary(hints.get(each.name, each.annotation))]
    if len(dictionaries) > 1:
        raise LoadError(
            f"failed to load model '{model.name}': Multiple inputs of kind DictType were detected. Only a single input "
            "of type Dict(str, Tensor) is supported."
        )
    if dictionaries and len(named) > 1:
        raise LoadError(
            f"failed to load model '{model.name}': forward({', '.join(map(str, named))}): a dictionary must be its "
            "only argument"
        )
    return named, max(others, default=None), bool(dictionaries)


def _is_dictionary(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return bool(_DICTIONARY.match(annotation))
    kind = typing.get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Mapping)


def error_text(error: BaseException, package: str) -> str:
    """Return the text of ``error``, its type unless it is a RuntimeError, and the line in the model's ``package``."""
    text = first_line(error)
    if not isinstance(error, RuntimeError):
        text = type(error).__name__ if text == type(error).__name__ else f"{type(error).__name__}: {text}"
    lines = [
        f" ({Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package
    ]
    return text + (lines[-1] if lines else "")
