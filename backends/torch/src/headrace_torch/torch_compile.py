"""``torch.compile`` for modules in a ``model.py``: its requirements, its directory for code, and its warm-up.

PyTorch compiles when a module is called with new shapes. So before the model is ready, an instance is called with zeros
of the config's dims, once for each batch size for which PyTorch compiles. PyTorch compiles a size of 1 separately. When
another size changes, PyTorch compiles code for a variable size.
"""

from __future__ import annotations

import inspect
import logging
import os
import stat
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from headrace import BackendError, LoadError, Model, ModelConfig, Tensors
from headrace_engines import PrivateModules
from headrace_torch.instance import ForwardInstance
from headrace_torch.parameters import COMPILE_KEY, is_trusted, parse_compile_options
from headrace_torch.torch_process import first_line
from headrace_torch.warm_up import zero_inputs

log = logging.getLogger("headrace.pytorch")

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_lock = threading.Lock()
#: Variants of one module that PyTorch compiles (``torch._dynamo.config.recompile_limit``); further ones run uncompiled.
_MOST_VARIANTS = 8


def compile_module(torch: Any, model: Model, module: Any, device: str) -> Any:
    """Return ``module``, which is compiled on its first call, if the config of ``model`` has the parameter; else
    ``module`` unchanged.

    Raises `LoadError` if a requirement is missing, and for a backend or a mode that PyTorch does not have."""
    options = parse_compile_options(model.parameters.torch_compile, model.parameters.trust and is_trusted(model))
    if options is None or options.get("disable"):
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own modules
        return _compile(torch, model, module, device, options)


def _compile(torch: Any, model: Model, module: Any, device: str, options: dict[str, Any]) -> Any:
    backend = options.get("backend", "inductor")
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise LoadError(
            f"model '{model.name}': parameter '{COMPILE_KEY}' has backend '{backend}', known here: "
            f"{', '.join(sorted(known))}"
        )
    if backend == "inductor":
        _prepare_inductor(model, device)
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        # PyTorch compiles at most eight variants of one function. Modules may share an inherited ``forward``.
        options["isolate_recompiles"] = True
    try:
        return torch.compile(module, **options)
    except Exception as error:  # a mode or an option that PyTorch does not have
        raise LoadError(f"model '{model.name}': parameter '{COMPILE_KEY}': {first_line(error)}") from error


def forget_compiled(torch: Any, modules: PrivateModules) -> None:
    """Remove PyTorch's compiled code of the functions and methods of ``modules``.

    The compiled code and the functions refer to each other, so neither is freed otherwise.
    """
    for module in modules.loaded():
        named = list(vars(module).values())
        classes = [each for each in named if isinstance(each, type) and each.__module__ == module.__name__]
        for each in [*named, *(member for kind in classes for member in vars(kind).values())]:
            if isinstance(each, FunctionType):
                torch._dynamo.eval_frame.remove_from_cache(each)


def _prepare_inductor(model: Model, device: str) -> None:
    """Set the directory for compiled code. Raises `LoadError` if it is not ours, or if there is no compiler."""
    from torch._inductor import cpp_builder
    from torch._inductor.runtime import runtime_utils  # here in PyTorch 2.6 and later

    pytorchs_own = runtime_utils.default_cache_dir()  # type: ignore[attr-defined]
    with _lock:
        if os.environ.get(_CACHE, "") in ("", pytorchs_own):  # PyTorch sets the latter when it is imported
            os.environ[_CACHE] = str(_own_directory())
    if device != "cpu":
        return  # PyTorch compiles for GPUs with the package triton, a dependency of its wheels for GPUs
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # the class depends on the version
        raise LoadError(
            f"model '{model.name}': torch.compile needs a C++ compiler, and there is none: install g++, or name one by "
            f"the environment variable CXX; or leave out the parameter '{COMPILE_KEY}'"
        ) from error


def _own_directory() -> Path:
    """Return ``$HEADRACE_CACHE/torchinductor``. Raises `LoadError` if other users may write there.

    PyTorch loads libraries and pickles from there. Its own default is in ``/tmp``, under a name that any user can
    create first.
    """
    directory = os.environ.get("HEADRACE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "headrace")
    folder = Path(directory).expanduser().absolute() / "torchinductor"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise LoadError(
            f"no compiled code can be kept in '{error.filename}': {error.strerror}; HEADRACE_CACHE or {_CACHE} may "
            "name another directory"
        ) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LoadError(f"directory '{folder}' must belong to the server's user only (mode 700)")
    return folder


class CompiledInstance(ForwardInstance):
    """An instance with a compiled module. Shapes that follow from the config are compiled before the first request."""

    def warm_up(self) -> None:
        """Raise `LoadError` with the compiler's words if it fails."""
        self._compile_all()
        self.capture()

    def _compile_all(self) -> None:
        config, name = self.model.config, self.model.name
        options = parse_compile_options(self.model.parameters.torch_compile, True) or {}
        batches, why = _batches(config, options.get("dynamic") is False)
        if why:
            log.warning("model '%s': %s, so the first requests wait until torch.compile is done", name, why)
        begin = time.monotonic()
        for inputs in batches:
            try:
                self.execute(inputs)
            except BackendError as error:
                if type(error.__cause__).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    message = " ".join(str(error.__cause__).split())[:2000]  # the cause is not on its first line
                    raise LoadError(f"model '{name}': torch.compile fails: {message}") from error
                log.warning("model '%s' fails for zeros, with which torch.compile is tried: %s", name, error.message)
                return
        if batches:
            log.info(
                "model '%s', instance '%s': compiled for %s in %.1f s",
                name,
                self.model.instance_name,
                f"batches of 1 to {config.max_batch_size}" if config.max_batch_size else "the dims of its config",
                time.monotonic() - begin,
            )


def _batches(config: ModelConfig, is_static: bool) -> tuple[Sequence[Tensors], str]:
    """Return inputs for which PyTorch compiles all code that requests need; and the obstacle, if there is one.

    ``is_static``: each number of rows is compiled separately.
    """
    most = config.max_batch_size
    if is_static and most > _MOST_VARIANTS:
        return (), f"each number of rows is compiled for itself, and the first {_MOST_VARIANTS} that come, only"
    sizes = (range(1, most + 1) if is_static else dict.fromkeys((most, min(most, 2), 1))) if most else [0]
    found = []
    for rows in sizes:
        zeros, why = zero_inputs(config, rows)
        if why:
            return (), why
        found.append(zeros)
    return found, ""
