"""Bundles and wheels of the server, where they shall run: `nox -s edge`.

The oracles are the stock client, and ONNX Runtime called here. CI runs `tests/commands/bundle`, which is cheap.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.http

from tests.deploy import aarch64

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples/models"
HEADRACE = Path(sys.executable).with_name("headrace")
IMAGE = (np.arange(2 * 64).reshape(2, 8, 8) % 17).astype(np.uint8)
PORTS = [f"--{name}-{what}" for name in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")]
#: The environment variables of another machine.
BARE = {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _wanted(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--edge", False):
        pytest.skip("nox -s edge runs it")


def bundle(*words: str) -> None:
    subprocess.run([HEADRACE, "bundle", *words], check=True)


@contextmanager
def serving(*command: str | Path) -> Iterator[int]:
    """The server that ``command`` starts; its HTTP port."""
    began = time.monotonic()
    with subprocess.Popen([*map(str, command), *PORTS], env=BARE, cwd="/", stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr)
            yield next(
                int(found[1]) for line in lines if (found := re.search(r"Started HTTPService at .*:(\d+)", line))
            )
            status = Path(f"/proc/{server.pid}/status").read_text()
            print(f"{time.monotonic() - began:.1f} s, {re.findall(r'VmHWM:.*', status)}")
            server.terminate()
            server.stderr.read()
            assert server.wait(60) == 0
        finally:
            server.kill()


def check(port: int) -> None:
    """The stock client's answer is that of the engine, called here."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=120) as client:
        image = tritonclient.http.InferInput("image", list(IMAGE.shape), "UINT8")
        image.set_data_from_numpy(IMAGE)
        found = client.infer("digits", [image]).as_numpy("probabilities")
    session = onnxruntime.InferenceSession(next(MODELS.glob("digits/1/*.onnx")))
    np.testing.assert_allclose(found, session.run(["probabilities"], {"image": IMAGE})[0], atol=1e-6)


@pytest.mark.parametrize("ending", ["tar.gz", "tar.zst"])
def test_a_bundle_serves_where_it_is_unpacked_and_after_a_move(tmp_path: Path, ending: str) -> None:
    bundle(f"--model-repository={MODELS}", f"--output={tmp_path / 'digits'}.{ending}", "--plugins=bundle,tritonserver")
    first, second = tmp_path / "here it is", tmp_path / "and there"
    first.mkdir()
    subprocess.run(["tar", "xf", f"{tmp_path / 'digits'}.{ending}", "-C", first], check=True)
    with serving(first / "digits/headrace", "serve") as port:
        check(port)
    first.rename(second)
    with serving(second / "digits/bin/tritonserver", f"--model-repository={second / 'digits/models'}") as port:
        check(port)
    subprocess.run([second / "digits/headrace", "bundle", "verify"], env=BARE, check=True)
    packages = {path.name.partition("-")[0] for path in second.glob("digits/lib/*/site-packages/*.dist-info")}
    assert {"headrace", "headrace_onnx", "headrace_bundle", "headrace_tritonserver", "onnxruntime"} <= packages
    assert not packages & {"torch", "openvino", "pytest", "pip", "headrace_torch"}


def test_wheels_install_without_an_index(tmp_path: Path) -> None:
    bundle("wheels", f"--model-repository={MODELS}", "--plugins=", f"--output={tmp_path / 'wheels'}")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    where = ("--no-index", f"--find-links={tmp_path / 'wheels'}")
    alone = {"PATH": BARE["PATH"], "PIP_CONFIG_FILE": os.devnull}
    subprocess.run(
        [tmp_path / "env/bin/pip", "install", "-q", *where, "-r", tmp_path / "wheels/requirements.txt"],
        env=alone, check=True,
    )  # fmt: skip
    with serving(tmp_path / "env/bin/headrace", "serve", f"--model-repository={MODELS}") as port:
        check(port)


def test_a_bundle_for_aarch64_serves_under_qemu(tmp_path: Path) -> None:
    qemu, root = aarch64.make(tmp_path), tmp_path / "root"
    words = ("--platform=manylinux_2_28_aarch64", f"--python-version={aarch64.PYTHON}", "--plugins=")
    bundle(f"--model-repository={MODELS}", f"--output={tmp_path / 'arm.tar.gz'}", *words)
    (root / "opt").mkdir(exist_ok=True)
    subprocess.run(["tar", "xf", tmp_path / "arm.tar.gz", "-C", root / "opt"], check=True)
    refused = subprocess.run([root / "opt/arm/headrace", "plugins"], capture_output=True, text=True, check=False)
    assert "this bundle is for aarch64" in refused.stderr
    machine = aarch64.command(qemu, root, "/opt/arm")[:-2]
    uname = subprocess.run([*machine, "-c", "import os; print(os.uname().machine)"], capture_output=True, check=True)
    assert uname.stdout == b"aarch64\n"
    with serving(*aarch64.command(qemu, root, "/opt/arm", "serve", "--model-repository=/opt/arm/models")) as port:
        check(port)
