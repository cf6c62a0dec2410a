"""Programs of Debian that the tests of `deploy` start: fetched once for a machine, not installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_CACHE = Path.home() / ".cache" / "headrace-tests"
_FETCH_S = 120


def debian_program(package: str, name: str) -> str:
    """Return the path of the program ``name``, from PATH or from the Debian package.

    If neither is there, the test is skipped; in CI it fails.
    """
    if found := shutil.which(name):
        return found
    folder = _CACHE / "debian" / package
    program = folder / "usr/bin" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _unpack(package, folder)
    return str(program)


def _unpack(package: str, folder: Path) -> None:
    script = f"apt-get download {package} && dpkg-deb -x {package}_*.deb . && rm {package}_*.deb"
    try:
        done = subprocess.run(
            ["sh", "-ec", f"{script} || {{ apt-get update -qq && {script}; }}"],
            cwd=folder, capture_output=True, text=True, timeout=_FETCH_S, check=False,
        )  # fmt: skip
        wrong = done.stdout + done.stderr if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    if wrong:
        text = f"apt-get could not fetch {package}: {wrong}"
        pytest.fail(text) if os.environ.get("CI") == "true" else pytest.skip(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--edge", action="store_true", help="make bundles and wheels, and serve from them, as root")
    parser.addoption("--image", action="store_true", help="build the container image, as root, and serve from it")
