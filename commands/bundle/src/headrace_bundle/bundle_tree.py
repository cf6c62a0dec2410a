"""Writes the files of a bundle except models: a relocatable virtual environment.

``headrace`` is a shell script. It finds its own folder, and starts ``bin/python`` there, a link to the system's Python.
The folder is an environment for that Python, because ``pyvenv.cfg`` is in it (PEP 405): plugins, the processes of
models and workers all find it by ``sys.executable``.
"""

from __future__ import annotations

import compileall
import shlex
import shutil
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from py_compile import PycInvalidationMode

from headrace_bundle.distribution_choice import is_program
from headrace_bundle.progress_line import ShowStep
from headrace_bundle.wheelhouse import TargetMachine, run_pip

_LAUNCHER = r"""#!/bin/sh
# Starts Headrace from this folder, wherever it lies: ./headrace serve
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
python=$here/bin/python
fail() {
    echo "$here: $1" >&2
    exit 1
}
if [ -n "@MACHINE@" ] && [ "$(uname -m)" != "@MACHINE@" ]; then
    fail "this bundle is for @MACHINE@, and this machine is $(uname -m)"
fi
if ! [ -x "$python" ]; then
    found=$(command -v python@PYTHON@) || fail "this bundle needs Python @PYTHON@: no python@PYTHON@ on PATH"
    # What PATH names may be a script, as of pyenv.
    found=$("$found" -c "import os, sys; print(os.path.realpath(sys.executable))") || fail "$found does not run"
    { ln -sfn "$found" "$python" && sed -i "s#^home = .*#home = $(dirname -- "$found")#" "$here/pyvenv.cfg"; } \
        2>/dev/null || fail "Python is $found, and not $(readlink "$python"): start it once where it can be written"
fi
case ${0##*/} in
@PROGRAMS@
*) code="from headrace_cli import main; sys.exit(main())" ;;
esac
if [ "${1-}" = serve ] && [ -d "$here/models" ]; then
    case " $*" in
    *" --model-repository"* | *" --model-store"* | *" @"*) ;;
    *)
        shift
        for folder in "$here"/models*; do set -- "--model-repository=$folder" "$@"; done
        set -- serve "$@"
        ;;
    esac
fi
unset PYTHONHOME
# Everything is compiled. A bundle may be read only.
export PYTHONDONTWRITEBYTECODE=1
# Without sys.path[0], the folder in which it is called.
exec "$python" -c "import sys; del sys.path[0]; sys.argv[0] = '${0##*/}'; $code" "$@"
"""
_SYSTEM = "/usr/bin"


def make_tree(tree: Path, wheels: Sequence[Path], target: TargetMachine, step: ShowStep) -> Path:
    """Install ``wheels`` into the new folder ``tree`` for ``target``, and return it. Raises `ConfigError`."""
    site = tree / f"lib/python{target.python}/site-packages"
    step("install", f"{len(wheels)} wheels")
    quick = ("--no-deps", "--no-index", "--no-compile", "--root-user-action=ignore")
    run_pip("install", *quick, f"--target={site}", *target.pip_words(), *wheels, step=step)
    shutil.rmtree(site / "bin", ignore_errors=True)  # each contains the path of the folder in which it was created
    (tree / "bin").mkdir()
    (tree / "bin/python").symlink_to(f"{_SYSTEM}/python{target.python}")
    (tree / "bin/headrace").symlink_to("../headrace")
    (tree / "pyvenv.cfg").write_text(f"home = {_SYSTEM}\ninclude-system-site-packages = false\n")
    programs = [f"{name}) code={shlex.quote(code)} ;;" for name, code in _programs(site, tree / "bin")]
    text = _LAUNCHER.replace("@PROGRAMS@", "\n".join(programs)).replace("@PYTHON@", target.python)
    (tree / "headrace").write_text(text.replace("@MACHINE@", target.machine))
    (tree / "headrace").chmod(0o755)
    if target.has_this_python:  # byte code is the same on all machines
        step("install", "compiling")
        compileall.compile_dir(site, quiet=2, stripdir=str(tree), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    step("install", f"{len(wheels)} wheels", is_last=True)
    return tree


def _programs(site: Path, folder: Path) -> list[tuple[str, str]]:
    """Return the other programs of plugins, and what each runs. Make a link to the launcher for each."""
    found = []
    for one in distributions(path=[str(site)]):
        if "headrace" not in one.entry_points.groups and not is_program(one):
            continue
        for entry in one.entry_points.select(group="console_scripts"):
            if entry.name != "headrace":
                (folder / entry.name).symlink_to("../headrace")
                found.append((entry.name, f"from {entry.module} import {entry.attr} as main; sys.exit(main())"))
    return sorted(found)
