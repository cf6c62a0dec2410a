"""The weights of a module: ``model.pt`` or ``model.safetensors`` beside its ``model.py``.

A ``.pt`` file is a pickle, and a pickle can run code. PyTorch's own reader of weights (``weights_only``) creates only
tensors and their containers. It refuses other pickles, unless the model's parameter ``trust`` is set.
"""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace import HeadraceError, LoadError, Model, in_memory, one_line
from headrace_torch import pickle_check
from headrace_torch.parameters import HOW_TO_TRUST, is_trusted

log = logging.getLogger("headrace.pytorch")

#: The most bytes of the pickles in a file from before PyTorch 1.6, where they precede the data of all weights.
_MOST_BYTES_OF_PICKLES = 64 << 20
#: The start of all other files of PyTorch: the magic number of zip archives.
_ZIP = b"PK\3\4"
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def load_weights(torch: Any, model: Model, code: Path, module: Any) -> None:
    """Load the weights of ``module``, an object of the class in ``code``, if the version has a file of weights.

    Raises `LoadError` naming the file, and every weight that is missing or that the module does not have."""
    path = _find(model, code)
    if path is None:
        count = sum(parameter.numel() for parameter in module.parameters())
        if count:
            log.info(
                "model '%s' has no file of weights: its %d parameters are as '%s' makes them", model.name, count, code
            )
        return
    try:
        state = _read(torch, model, path)
    except HeadraceError:
        raise
    except Exception as error:  # for a damaged file, PyTorch may raise any exception
        reason = str(error).strip()
        if not reason or reason.startswith("Weights only load failed"):  # the rest advises to switch the check off
            reason = "it is damaged, or no file of torch.save"
        raise _failure(model, path, one_line(reason)[:500]) from error
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split()).replace("Error(s) in loading state_dict for", "does not fit the class")
        raise _failure(model, path, text[:4000]) from error


def _find(model: Model, code: Path) -> Path | None:
    found = [path for path in (code.with_suffix(".pt"), code.with_suffix(".safetensors")) if path.exists()]
    if len(found) > 1:
        raise _failure(model, found[0], f"'{found[1].name}' lies beside it, and only one of them can be the weights")
    return found[0] if found else None


def _read(torch: Any, model: Model, path: Path) -> Mapping[str, Any]:
    with in_memory(path) as opened:
        if path.suffix == ".safetensors":
            state = _read_safetensors(model, path, opened)
        else:
            state = _read_pickle(torch, model, path, opened)
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise _failure(model, path, f"it holds a {type(state).__name__}, not the weights of a module by their names")
    return state


def _read_safetensors(model: Model, path: Path, opened: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise LoadError(
            f"model '{model.name}': '{path.name}' needs the package safetensors, which cannot be imported ({error}); "
            "run: pip install 'headrace-torch[safetensors]'"
        ) from error
    return load_file(opened)


def _read_pickle(torch: Any, model: Model, path: Path, opened: str) -> Any:
    """Return the weights on the CPU, from where they are copied to the module later.

    The file is mapped, so that large weights are not in memory twice.
    """
    can_map = _is_stored(opened)
    if is_trusted(model):
        return _run_pickle(torch, opened, can_map)
    if found := _damage(torch, opened):
        raise _failure(model, path, f"it is damaged, or no file of torch.save: {found}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about TorchScript, which is refused
            return torch.load(opened, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # includes the error of pickle, a module that must not be imported here
        named = _GLOBAL.search(str(error))
        if named is None:
            raise
        raise _failure(
            model,
            path,
            f"it is more than weights: it names '{one_line(named[1])[:200]}', which could run code. Save the weights "
            f"alone, torch.save(module.state_dict(), ...), or, {HOW_TO_TRUST}",
        ) from None


def _damage(torch: Any, path: str) -> str:
    with Path(path).open("rb") as file:
        if file.read(4) != _ZIP:  # the format before PyTorch 1.6: five pickles, then the data
            file.seek(0)
            content = file.read(_MOST_BYTES_OF_PICKLES)
            return pickle_check.damage(content, count=5) or pickle_check.absent(torch, content)
    reader = torch._C.PyTorchFileReader(path)
    return pickle_check.damage(reader.get_record("data.pkl")) or pickle_check.oversized(torch, reader, "data")


def _is_stored(path: str) -> bool:
    """True if ``path`` is a zip archive without compression, as PyTorch writes it.

    PyTorch would map compressed data, and read it as numbers.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _run_pickle(torch: Any, path: str, can_map: bool) -> Any:
    """Return the object in the pickle. A pickle can run any code: only for models with ``trust``."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=can_map)


def _failure(model: Model, path: Path, problem: str) -> LoadError:
    return LoadError(f"failed to load model '{model.name}': '{path}': {problem}")
