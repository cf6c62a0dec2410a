"""Prints, as JSON, what the classes of TensorRT's bindings declare. A program: it loads libraries that do nothing.

The bindings need TensorRT's libraries to be imported, and nothing of them to say what they declare. So empty libraries
of those names are compiled, with the functions that the loader misses; to call one would do nothing. Arguments: a
folder to compile in, and the C compiler.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CLASSES = (
    "Runtime", "ICudaEngine", "IExecutionContext", "Refitter", "IPluginRegistry", "Weights", "ILogger",
    "IOutputAllocator", "Dims",
)  # fmt: skip
ENUMERATIONS = (
    "DataType", "TensorIOMode", "TensorLocation", "TensorFormat", "ExecutionContextAllocationStrategy",
)  # fmt: skip
FUNCTIONS = ("init_libnvinfer_plugins", "get_plugin_registry")


def load(folder: Path, compiler: str) -> ModuleType:
    """The bindings; raises what is left to raise when no library and no function is missing any more."""
    libraries: list[str] = []
    functions: list[str] = []
    while True:
        try:
            return importlib.import_module("tensorrt_bindings")
        except ImportError as error:
            missing = re.match(r"(lib\S+): cannot open shared object file", str(error))
            symbol = re.search(r"undefined symbol: (\w+)$", str(error))
            if missing:
                libraries.append(missing[1])
            elif symbol:
                functions.append(symbol[1])
            else:
                raise
        for name in [each for each in sys.modules if each.startswith("tensorrt_bindings")]:
            del sys.modules[name]
        source = folder / f"nothing{len(functions)}.c"
        source.write_text("".join(f"long {function}(void) {{ return 0; }}\n" for function in functions[-1:]))
        if symbol:
            _compile(compiler, source, folder / f"{source.stem}.so", f"{source.stem}.so")
        elif missing:
            _compile(compiler, source, folder / missing[1], missing[1])


def _compile(compiler: str, source: Path, target: Path, name: str) -> None:
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(target), f"-Wl,-soname,{name}"]
    subprocess.run(command, check=True, timeout=60)
    ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def described(cls: type) -> dict[str, Any]:
    """The docstrings of the methods of ``cls``, of its properties with whether they can be set, and its own."""
    methods: dict[str, str] = {}
    properties: dict[str, list[Any]] = {}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            if isinstance(value, property):
                properties[name] = [value.fget.__doc__ or "", value.fset is not None]
            elif callable(value) and value.__doc__:
                methods[name] = value.__doc__
    return {"methods": methods, "properties": properties, "doc": cls.__doc__}


def main() -> None:
    bindings = load(Path(sys.argv[1]), sys.argv[2])
    found = {
        "version": bindings.__version__,
        "classes": {name: described(getattr(bindings, name)) for name in CLASSES},
        "enumerations": {name: list(getattr(bindings, name).__members__) for name in ENUMERATIONS},
        "functions": {name: getattr(bindings, name).__doc__ for name in FUNCTIONS},
        "dims": [bindings.Dims([1, 2, -1])[axis] for axis in range(len(bindings.Dims([1, 2, -1])))],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
