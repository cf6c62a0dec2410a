"""Real environments, made without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


def _site_packages(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _give_numpy(root: Path) -> None:
    """The server's NumPy, without its tests."""
    source = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (source / name).exists():
            shutil.copytree(
                source / name, _site_packages(root) / name, ignore=shutil.ignore_patterns("tests", "__pycache__")
            )


@pytest.fixture(scope="session")
def virtual_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with NumPy, and a module ``colour`` that the server does not have.

    Like an archive of conda-pack, it has no link to the outside.
    """
    root = tmp_path_factory.mktemp("environments") / "blue"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", root], check=True)
    (root / "lib64").unlink()
    _give_numpy(root)
    (_site_packages(root) / "colour.py").write_text("NAME = 'blue'\n")
    return root


@pytest.fixture(scope="session")
def packed_environment(virtual_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment in the form of conda-pack: without a top folder, and with a program that sets the paths."""
    program = (
        "import os, sys\nroot = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n"
        "with open(os.path.join(root, 'unpacked'), 'a') as file:\n    print(root, sys.prefix, file=file)\n"
    )
    script = tmp_path_factory.mktemp("scripts") / "conda-unpack"
    script.write_text(program)
    path = tmp_path_factory.mktemp("archives") / "blue.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(virtual_environment, arcname=".")
        archive.add(script, arcname="bin/conda-unpack")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Build a wheel of one module in the only directory that pip searches. Return its SHA-256."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def build(name: str, version: str = "1.0", code: str = "") -> str:
        import hashlib

        path = folder / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}.py", code)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return build
