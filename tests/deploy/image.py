"""Builds the container image without a registry, for `test_image.py`: as root, with buildah and debootstrap.

The base is a Debian made on the spot, in place of Docker's image of Python. buildah runs the steps in a chroot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Each is a program of the Debian package of its name.
NEEDED = ("buildah", "debootstrap")
_BASE = "localhost/headrace-test-base"
_IMAGE = "localhost/headrace-test"


def why_not() -> str:
    """Return why no image can be built here; empty if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed to build an image"
    return "" if os.geteuid() == 0 else "an image is built as root"


class Builder:
    """buildah with its own storage in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str | Path) -> str:
        storage = ("--storage-driver=vfs", f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}")
        return _run("buildah", *storage, *words)

    def make_base(self) -> None:
        tree = self.folder / "base"
        _run("debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", tree)
        for left in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(tree / left)
        container = self("from", "scratch")
        self("add", container, tree, "/")
        self("commit", "--rm", container, _BASE)
        shutil.rmtree(tree)

    def make_image(self) -> None:
        file = ROOT / "deploy/docker/Dockerfile"
        arguments = ("--isolation=chroot", "--format=docker", f"--build-arg=BASE={_BASE}", *_pip_settings())
        self("bud", *arguments, "-f", file, "-t", _IMAGE, ROOT)


@contextmanager
def built(folder: Path) -> Iterator[Path]:
    """Build the image in ``folder``, which takes some minutes. Yield its tree; remove all at the end."""
    builder = Builder(folder)
    builder.make_base()
    builder.make_image()
    container = builder("from", _IMAGE)
    try:
        yield Path(builder("mount", container))
    finally:
        builder("umount", container)
        builder("rm", container)
        builder("rmi", "--all")


def _pip_settings() -> list[str]:
    """Let pip in the build read what pip reads here: its settings, and the local files and folders that they name."""
    settings = _run("pip", "config", "list")
    paths = [Path(word) for word in re.findall(r"(?:file://)?(/[^\s'\"]+)", settings)]
    named = {path.parent if path.name == "simple" else path for path in paths}  # the files are beside the index
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    words = [f"--volume={path}:{path}:ro" for path in sorted({*named, certificates}) if path.exists()]
    files = [Path.home() / ".config/pip/pip.conf", Path("/etc/pip.conf")]
    if found := next((path for path in files if path.exists()), None):
        words.append(f"--secret=id=pip.conf,src={found}")
    return words


def _run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()
