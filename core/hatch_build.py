"""Compile the hot modules into a wheel, by Cython and the C compiler that is here.

Only where it is asked for: ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel ./core``. Without, wheels are pure and need
no compiler, and editable installs always are. What is compiled, and why, stands in ``pyproject.toml``, at this hook.
``HEADRACE_BUILD_JOBS`` says how many compilers run at once (as many as there are processors, unless given),
``HEADRACE_BUILD_FOLDER`` where what they make is kept, so that the next build compiles what has changed (nowhere), and
``HEADRACE_BUILD_ONLY`` leaves all modules out but those that match one of its patterns, for a test of the build.

The source goes into the wheel, too: tracebacks show its lines, and interpreters that the wheel was not built for, which
an instance in a process of its own may have, run it. ``compiled.json`` has a digest of each, by which
``headrace.compilation`` notices that somebody changed it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from Cython import __version__ as cython_version
from Cython.Build import cythonize
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

#: What Cython is told. Annotations are mypy's: to Cython, `dict` would refuse what is derived from it.
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "emit_code_comments": False}
#: Later than Python's own flags, and so what holds. No debug information: it is ten times as large as the code.
COMPILE_ARGUMENTS = ["-O2", "-g0", "-fno-semantic-interposition", "-fvisibility=hidden"]
LINK_ARGUMENTS = ["-Wl,-s"]


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling is not where types are checked
    """Adds extension modules to the wheel, each beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is filled; ``version`` is "editable" for one that only points at the source."""
        if version == "editable":
            return
        source = Path(self.root, "src")
        modules = list(hot_modules(source, self.config["compiled"], self.config["not-compiled"]))
        if only := os.environ.get("HEADRACE_BUILD_ONLY", "").split():
            modules = [module for module in modules if any(module.match(pattern) for pattern in only)]
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-")  # goes with this hook
        folder = Path(os.environ.get("HEADRACE_BUILD_FOLDER", self._temporary.name)).absolute()
        included = {str(path): str(name) for name, path in compile_all(source, modules, folder)}
        record = Path(self._temporary.name, "compiled.json")
        record.write_text(json.dumps({"compiler": compiler(), "sources": digests(source, modules)}, indent=1), "utf-8")
        build_data["force_include"] |= included | {str(record): f"headrace/{record.name}"}
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def hot_modules(source: Path, compiled: Sequence[str], left_out: Sequence[str]) -> Iterator[Path]:
    """The files, relative to ``source``, that match a pattern of ``compiled`` and none of ``left_out``.

    Raises `ValueError` for a pattern that matches nothing: the module has moved, and the list must follow.
    """

    def matching(pattern: str) -> set[Path]:
        found = {path.relative_to(source) for path in source.glob(pattern)}
        if not found:
            raise ValueError(f"'{pattern}' in core/pyproject.toml matches no module")
        return found

    out = {path for pattern in left_out for path in matching(pattern)}
    yield from sorted({path for pattern in compiled for path in matching(pattern)} - out)


def compile_all(source: Path, modules: Sequence[Path], folder: Path) -> Iterator[tuple[Path, Path]]:
    """Make an extension module of each of ``modules``, in ``folder``: each with the path that it has in the wheel.

    What is there from an earlier build and newer than its source stays as it is.
    """
    jobs = int(os.environ.get("HEADRACE_BUILD_JOBS", "0")) or os.cpu_count() or 1
    extensions = [
        Extension(
            ".".join(module.with_suffix("").parts),
            [str(module)],
            extra_compile_args=COMPILE_ARGUMENTS,
            extra_link_args=LINK_ARGUMENTS,
        )
        for module in modules
    ]
    before = Path.cwd()
    os.chdir(source)  # tracebacks name a file as it is named here, and Python finds it so on its path
    try:
        made = cythonize(extensions, build_dir=str(folder), nthreads=jobs, compiler_directives=DIRECTIVES, quiet=True)
        command = build_ext(Distribution({"ext_modules": made}))
        command.build_lib, command.build_temp, command.parallel = str(folder), str(folder), jobs
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    for module, extension in zip(modules, made, strict=True):
        path = Path(command.get_ext_fullpath(extension.name))
        yield module.with_name(path.name), path


def digests(source: Path, modules: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each module's source, by its path."""
    return {str(module): hashlib.sha256(source.joinpath(module).read_bytes()).hexdigest() for module in modules}


def compiler() -> str:
    """What compiles here, in words."""
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0]
    version = subprocess.run([command, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True)
    return f"Cython {cython_version}, {Path(command).name} {version.stdout.split()[0]}"
