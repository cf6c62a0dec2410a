"""Describes the running Python and its build: one without optimisations costs 5 to 11 % of every figure.

As a program, it prints the description of the Python that runs it.
"""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def is_optimised(variables: Mapping[str, object]) -> bool:
    """True if the Python with these configuration variables was built with profile-guided optimisation.

    Debian optimises without ``--enable-optimizations``, and clears the flag of the profile.
    """
    return "--enable-optimizations" in str(variables.get("CONFIG_ARGS")) or variables.get("PGO_PROF_USE_FLAG") == ""


def build() -> str:
    """Return the version and the build of this Python, in words."""
    if is_optimised(sysconfig.get_config_vars()):
        return f"Python {platform.python_version()} (optimised)"
    return f"**Python {platform.python_version()}, built without optimisations: an optimised one wins 5 to 11 %**"


def build_beside(program: Path) -> str:
    """Return `build` of the Python beside ``program``, which runs it; "" if there is none."""
    interpreter = program.with_name("python")
    if not interpreter.exists():
        return ""
    process = subprocess.run([interpreter, Path(__file__).absolute()], capture_output=True, text=True, check=True)
    return process.stdout.strip()


if __name__ == "__main__":
    print(build())
