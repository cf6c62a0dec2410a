"""A real Triton to compare with: ``python benchmarks/yardsticks.py DIR``, then ``run.py --yardsticks DIR``.

Puts Triton Inference Server 2.51, with its Python backend and for the CPU only, and perf_analyzer 2.41 into DIR, both
out of wheels that PyPI has. DIR then holds the commands ``tritonserver`` and ``perf_analyzer``, 300 MiB in all. Needs
Linux on x86-64, glibc 2.35, Python 3.8 to 3.13, and Debian's ``libb64-0d``.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
DEFAULT = BENCHMARKS.parent / "build" / "yardsticks"
#: The wheel with the server, and the last one with perf_analyzer.
SERVER, CLIENT = "nvidia-pytriton==0.7.0", "tritonclient==2.41.0"


def install(folder: Path) -> None:
    """Install both. Raises `SystemExit` if a library of the system is missing, and the exceptions of pip."""
    try:
        ctypes.CDLL("libb64.so.0d")
    except OSError:
        raise SystemExit("tritonserver needs libb64: apt-get install libb64-0d") from None
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        _download(Path(wheels), SERVER)
        _download(Path(wheels), CLIENT, "--only-binary=:all:", "--platform=manylinux1_x86_64")
        for package in ("nvidia_pytriton", "tritonclient"):
            [wheel] = Path(wheels).glob(f"{package}-*.whl")
            shutil.rmtree(folder / package, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / package)
    # The Python of its models. Its stub is older than NumPy 2, with which it returns empty tensors.
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    subprocess.run([str(folder / "venv/bin/pip"), "install", "-q", "numpy<2"], check=True)
    _command(folder / "tritonserver", _server(folder))
    _command(folder / "perf_analyzer", _analyzer(folder))


def _download(wheels: Path, requirement: str, *options: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    subprocess.run([*pip, *options, requirement], check=True)


def _server(folder: Path) -> Sequence[str]:
    wheel = folder / "nvidia_pytriton"
    root = wheel / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    shutil.copy(root / "python_backend_stubs" / version / stub.name, stub)
    program = root / "bin" / "tritonserver"
    for each in (stub, program):
        each.chmod(0o755)
    return (
        f'PATH="{folder}/venv/bin:$PATH" LD_LIBRARY_PATH="{wheel}/nvidia_pytriton.libs"',
        f'exec "{program}" "--backend-directory={root}/backends" "--cache-directory={root}/caches" "$@"',
    )


def _analyzer(folder: Path) -> Sequence[str]:
    """Link CUDA's run-time library, which the other wheel has under a longer name."""
    libraries = folder / "libraries"
    libraries.mkdir(exist_ok=True)
    [cuda] = (folder / "nvidia_pytriton" / "nvidia_pytriton.libs").glob("libcudart-*.so.12*")
    link = libraries / "libcudart.so.12"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda)
    [program] = (folder / "tritonclient").glob("*/data/bin/perf_analyzer")
    program.chmod(0o755)
    return (f'LD_LIBRARY_PATH="{libraries}"', f'exec "{program}" "$@"')


def _command(path: Path, words: Sequence[str]) -> None:
    path.write_text("#!/bin/sh\n" + " ".join(words) + "\n")
    path.chmod(0o755)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT, help="made if need be; build/yardsticks")
    chosen: Path = parser.parse_args().folder
    install(chosen)
    print(f"ready: {chosen}/tritonserver, {chosen}/perf_analyzer")
