"""Runs packages of AOTInductor, ``model.pt2``: native code, which has all the rights of the server.

So a package is loaded only if the model's parameter ``trust`` is true. On a CPU, its library is called by AOTInductor's
C interface (``torch/csrc/inductor/aoti_runtime/interface.h``). PyTorch's loader for Python holds the interpreter's lock
while the library computes, which would block the whole server.
"""

from __future__ import annotations

import _ctypes
import ctypes
import logging
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace import Model
from headrace_torch.aoti_signature import package_signature
from headrace_torch.exported_program import Program
from headrace_torch.instance import Forward
from headrace_torch.parameters import HOW_TO_TRUST, is_trusted
from headrace_torch.pt2_archive import Pt2Archive
from headrace_torch.torch_process import first_line

log = logging.getLogger("headrace.pytorch")

#: AOTInductor's name of each CPU extension, and its flag in Linux.
_EXTENSIONS: Mapping[str, str] = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_TILE": "amx_tile",
    "AMX_FP16": "amx_fp16",
}
_Pointers = ctypes.POINTER(ctypes.c_void_p)


def open_package(torch: Any, model: Model, archive: Pt2Archive, device: str, instances: int) -> Program:
    """Return the package in ``archive``, on ``device``. At most ``instances`` may execute it at once.

    Raises `LoadError` without ``trust``, and for code compiled for another machine."""
    name = archive.choose("packages", archive.packages)
    folder = f"data/aotinductor/{name}/"
    if not is_trusted(model):
        raise archive.failure(
            f"is a package of AOTInductor: '{folder}' in it is native code, which can do whatever the server can; "
            f"{HOW_TO_TRUST}"
        )
    names = archive.names(folder)
    _require_machine(archive, names, device)
    libraries = [each for each in names if each.endswith(".so")]
    wrapper = [each for each in libraries if each.endswith(".wrapper.so")] or libraries
    if len(wrapper) != 1:
        raise archive.failure(f"has {len(wrapper)} libraries in '{folder}', expected one")
    if any(each.endswith("/weights_config.json") for each in names):
        raise archive.failure("keeps its weights outside of its library: package it with the weights inside")
    library: AotiLibrary | _LoaderOfPyTorch
    try:
        if device != "cpu":  # `AotiLibrary` crashed on an H100, with PyTorch 2.11, for an unknown reason
            library = _LoaderOfPyTorch(torch, archive.path, name, device, instances)
        elif f"{wrapper[0].removesuffix('.so')}.json" in names:
            library = _LoaderOfPyTorch(torch, archive.path, name, device, instances)
            log.warning(
                "model '%s' has operators that only PyTorch's own loader calls, which holds the interpreter's lock: "
                "with the parameter 'isolation' of 'process' the server need not wait for it",
                model.name,
            )
        else:
            library = _extract_and_load(torch, archive, names, wrapper[0], device, instances)
        signature = package_signature(archive, name, library.call_spec, library.input_count)
    except (OSError, RuntimeError, ValueError) as error:
        raise archive.failure(first_line(error)) from error
    # A call that holds the interpreter's lock must not also run on the event loop.
    any_thread = device == "cpu" and isinstance(library, AotiLibrary)
    # Inputs are copied, because a result may share their memory, and a kernel may write to it. The copies take 0.1 % of
    # the time of the benchmark networks. Only the source of a package shows if a copy is not needed.
    forward = Forward(run=library.run, device=device, arguments=None, writes=True, any_thread=any_thread)
    return Program(forward, signature)


class AotiLibrary:
    """A library of AOTInductor with a container for ``count`` executions at once."""

    def __init__(self, torch: Any, path: Path, device: str, count: int, files: TemporaryDirectory[str]) -> None:
        self._torch, self._device = torch, device
        self._library = ctypes.CDLL(str(path))
        self._container = ctypes.c_void_p()
        self._call(
            "CreateWithDevice",
            ctypes.byref(self._container),
            ctypes.c_size_t(count),
            device.encode(),
            str(path.parent).encode(),
        )
        #: Closes the library after its last user.
        self._finalizer = weakref.finalize(self, _close, self._library, self._container, files)
        self.input_count, self._output_count = self._count("GetNumInputs"), self._count("GetNumOutputs")
        takes, gives = ctypes.c_char_p(), ctypes.c_char_p()
        self._call("GetCallSpec", self._container, ctypes.byref(takes), ctypes.byref(gives))
        self.call_spec = ((takes.value or b"").decode(), (gives.value or b"").decode())
        self._inputs, self._outputs = ctypes.c_void_p * self.input_count, ctypes.c_void_p * self._output_count
        self._run = self._function("Run" if count > 1 else "RunSingleThreaded")
        self._run.argtypes = [
            ctypes.c_void_p,
            _Pointers,
            ctypes.c_size_t,
            _Pointers,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._pointer_of: Callable[..., int] = ctypes.pythonapi.PyCapsule_GetPointer
        ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
        ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self._capsule_of: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
        ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
        ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    def run(self, *tensors: Any) -> Sequence[Any]:
        """Return the results for ``tensors``, which must have the layout of the compilation.

        Releases the interpreter's lock while the library computes. Raises `RuntimeError` with the library's message.
        """
        torch = self._torch
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        inputs = self._inputs(*[self._pointer_of(each, None) for each in capsules])
        outputs = self._outputs()
        stream = None if self._device == "cpu" else torch.cuda.current_stream().cuda_stream
        code = self._run(self._container, inputs, self.input_count, outputs, self._output_count, stream, None)
        if code:
            raise RuntimeError(self._last_error())
        found: Sequence[Any] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [self._capsule_of(each, None, None) for each in outputs]
        )
        return found

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, f"AOTInductorModelContainer{name}")
        except AttributeError as error:
            raise OSError(f"has a library without AOTInductor's function '{name}': {error}") from error

    def _call(self, name: str, *arguments: Any) -> None:
        if self._function(name)(*arguments):
            raise RuntimeError(self._last_error())

    def _count(self, name: str) -> int:
        found = ctypes.c_size_t()
        self._call(name, self._container, ctypes.byref(found))
        return found.value

    def _last_error(self) -> str:
        text = ctypes.c_char_p()
        if hasattr(self._library, "AOTInductorGetLastError"):  # not in libraries of an older PyTorch
            self._library.AOTInductorGetLastError(ctypes.byref(text))
        return (text.value or b"the library failed, and its log says why").decode(errors="replace")


class _LoaderOfPyTorch:
    """Calls a library by PyTorch's own loader, for libraries with operators that only PyTorch can call."""

    def __init__(self, torch: Any, path: Path, name: str, device: str, count: int) -> None:
        index = int(device.partition(":")[2] or 0) if device != "cpu" else -1
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), name, False, count, index)
        takes, gives = self._loader.get_call_spec()
        self.call_spec: tuple[str, str] = (takes, gives)
        self.input_count = None

    def run(self, *tensors: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._loader.boxed_run(list(tensors))
        return found


def _extract_and_load(
    torch: Any, archive: Pt2Archive, names: Sequence[str], library: str, device: str, count: int
) -> AotiLibrary:
    files = TemporaryDirectory(prefix="headrace-aoti-")
    try:
        return _load_from(torch, archive, names, library, device, count, files)
    except BaseException:
        files.cleanup()
        raise


def _load_from(
    torch: Any,
    archive: Pt2Archive,
    names: Sequence[str],
    library: str,
    device: str,
    count: int,
    files: TemporaryDirectory[str],
) -> AotiLibrary:
    for name in names:
        if not name.endswith(".cpp"):  # the library does not need its sources
            Path(files.name, Path(name).name).write_bytes(archive.read(name))
    return AotiLibrary(torch, Path(files.name, Path(library).name), device, count, files)


def _close(library: Any, container: ctypes.c_void_p, files: TemporaryDirectory[str]) -> None:
    library.AOTInductorModelContainerDelete(container)
    _ctypes.dlclose(library._handle)
    files.cleanup()


def _require_machine(archive: Pt2Archive, names: Sequence[str], device: str) -> None:
    """Raise `LoadError` for code that this machine cannot execute, which would crash the server."""
    found: dict[str, str] = {}
    for name in names:
        if name.endswith("_metadata.json"):
            found |= archive.document(name)
    kind, machine = found.get("AOTI_DEVICE_KEY", "cpu"), found.get("AOTI_MACHINE", "")
    if kind != device.partition(":")[0]:
        raise archive.failure(f"was compiled for '{kind}', and the instance runs on '{device}': compile it for that")
    if machine not in ("", platform.machine()):
        raise archive.failure(f"was compiled for a machine '{machine}', and this is a '{platform.machine()}'")
    required = {word: _EXTENSIONS[word] for word in found.get("AOTI_CPU_ISA", "").split() if word in _EXTENSIONS}
    flags = _cpu_flags()
    missing = [word for word, flag in required.items() if flags and flag not in flags]
    if missing:
        raise archive.failure(f"was compiled for a CPU with {', '.join(missing)}, which this one does not have")


def _cpu_flags() -> set[str]:
    """Return the CPU's flags from Linux; empty if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
