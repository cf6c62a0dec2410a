"""The container image. In CI its Dockerfile is read by hadolint; `nox -s image` builds it, and serves from it.

No container is started: the tree of the image is the root of a process with its own mounts and process numbers, read
only, as the user of the image.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from tests.deploy.image import ROOT, built, why_not

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
MAX_BYTES = 400_000_000
#: The command of the HEALTHCHECK.
HEALTHCHECK: list[str] = json.loads(re.findall(r"^    CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)[0])
#: Makes the tree $1 the root of the rest of the command line, read only but for /tmp, as the user of the image.
IN_IMAGE = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"
mount -t tmpfs tmpfs "$1/tmp" && mount -t proc proc "$1/proc" && mount --bind /dev "$1/dev"
mkdir "$1/tmp/models" && mount --bind -o ro "$2" "$1/tmp/models"
tree=$1; shift 2
exec chroot --userspec=1000:1000 "$tree" env -i PATH=/opt/headrace/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 "$@"
"""


def test_hadolint_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_distribution_can_be_named_in_a_build() -> None:
    """The build context has the files that `.dockerignore` does not exclude."""
    folders = {path.parent.parent.name for path in ROOT.glob("*/[!_]*/pyproject.toml")}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert len(folders) > 9
    assert folders <= {line[1:] for line in lines if line.startswith("!")}


@pytest.fixture(scope="module")
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the image."""
    if not request.config.getoption("--image", False):
        pytest.skip("nox -s image builds the image")
    if reason := why_not():
        pytest.fail(reason)
    with built(tmp_path_factory.mktemp("image")) as tree:
        yield tree


def in_image(tree: Path, *words: str) -> subprocess.Popen[str]:
    apart = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    models = ROOT / "examples/models"
    return subprocess.Popen(
        [*apart, "sh", "-ec", IN_IMAGE, "-", tree, models, *words], stderr=subprocess.PIPE, text=True
    )


def test_it_is_smaller_than_400_mb(tree: Path) -> None:
    done = subprocess.run(["du", "-sxB1", tree], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) < MAX_BYTES


def test_its_bill_of_materials_names_what_is_installed(tree: Path) -> None:
    listed = json.loads((tree / "opt/headrace/sbom.json").read_text())["components"]
    installed = {
        re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower()
        for path in tree.glob("opt/headrace/lib/python3*/site-packages/*.dist-info")
    }
    assert {re.sub(r"[-_.]+", "-", each["name"]).lower() for each in listed} == installed
    assert {"headrace", "headrace-onnx", "headrace-python", "onnxruntime"} <= installed


@pytest.mark.parametrize("program", [("headrace", "serve"), ("/opt/tritonserver/bin/tritonserver",)])
def test_it_serves_read_only_as_process_1_and_ends_at_sigterm(tree: Path, program: tuple[str, ...]) -> None:
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    began = time.monotonic()
    with in_image(tree, *program, "--model-repository=/tmp/models", *ports) as server:
        assert server.stderr is not None
        lines = iter(server.stderr)
        http = next(found[1] for line in lines if (found := re.search(r"Started HTTPService at .*:(\d+)", line)))
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{http}") as client:
            image = tritonclient.http.InferInput("image", [1, 8, 8], "UINT8")
            image.set_data_from_numpy(np.zeros((1, 8, 8), np.uint8))
            probabilities = client.infer("digits", [image]).as_numpy("probabilities")
        print(f"{program[0]}: {time.monotonic() - began:.2f} s from the start to the first answer")
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        words = [HEALTHCHECK[0], *(word.replace("8000", http) for word in HEALTHCHECK[1:])]
        assert subprocess.run(["chroot", tree, *words], check=False).returncode == 0
        subprocess.run(["pkill", "-TERM", "-P", str(server.pid)], check=True)  # unshare ends as its child does
        rest = server.stderr.read()
        assert server.wait(20) == 0, rest
    assert subprocess.run(["chroot", tree, *words], stderr=subprocess.DEVNULL, check=False).returncode == 1
