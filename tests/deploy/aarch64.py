"""A Debian of arm64 on this machine, for `test_edge.py`: its files, and the program of qemu that runs its Python.

The Python is that of Debian 12, 3.11. qemu is that of Debian 13: the one of Debian 12, 7.2, ends with a segmentation
fault when ONNX Runtime 1.31 is imported.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SERVER = "http://deb.debian.org/debian"
#: Python's version in Debian 12.
PYTHON = "3.11"


def make(folder: Path) -> Path:
    """Make the tree ``folder/root``, as root, and return qemu. Takes a minute."""
    root, apt = folder / "root", folder / "apt"
    _run("debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", "--include=python3", "bookworm", root, SERVER)
    for package in sorted(root.glob("var/cache/apt/archives/*.deb")):
        _run("dpkg-deb", "-x", package, root)
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "sources.list").write_text(f"deb {SERVER} trixie main\n")
    places = {"Etc::sourcelist": "sources.list", "Etc::sourceparts": "none", "State::Lists": "lists", "Cache": "cache"}
    settings = [f"-oDir::{name}={apt / place}" for name, place in places.items()]
    _run("apt-get", *settings, "update")
    _run("apt-get", *settings, "download", "qemu-user", cwd=folder)
    _run("dpkg-deb", "-x", *folder.glob("qemu-user_*.deb"), folder / "qemu")
    return folder / "qemu/usr/bin/qemu-aarch64"


def command(qemu: Path, root: Path, bundle: str, *words: str) -> list[str]:
    """Return the command line with which the launcher of ``bundle``, a path in ``root``, would start Python there."""
    code = "import sys; del sys.path[0]; sys.argv[0] = 'headrace'; from headrace_cli import main; sys.exit(main())"
    python = f"{root}/usr/bin/python{PYTHON}"
    return [str(qemu), "-L", str(root), "-0", f"{bundle}/bin/python", python, "-c", code, *words]


def _run(*words: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
