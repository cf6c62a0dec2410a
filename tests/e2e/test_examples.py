"""The examples, run as a reader of the README runs them: with the programs of this environment."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/digits/1/model.onnx"
PENSTOCK = Path(sys.executable).with_name("penstock")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for_start(process: subprocess.Popen[str]) -> None:
    """Return once the log says that HTTP and gRPC listen; fail with the log if it ends before."""
    assert process.stdout
    log, awaited = "", {"Started GRPCInferenceService at", "Started HTTPService at"}
    for line in process.stdout:
        log += line
        awaited = {text for text in awaited if text not in line}
        if not awaited:
            return
    pytest.fail(f"the server ended with {process.wait()}:\n{log}")


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """The HTTP and gRPC ports of a server of examples/models, which must drain and exit with 0."""
    http, grpc, metrics = free_ports(3)
    addresses = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
    flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", *addresses]
    command = [str(PENSTOCK), "serve", f"--model-repository={ROOT / 'examples/models'}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_for_start(process)
            yield http, grpc
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_classify_reads_over_95_percent_of_held_out_digits_over_http_and_grpc(ports: tuple[int, int]) -> None:
    http, grpc = ports
    answer = run("classify.py", f"--http=127.0.0.1:{http}", f"--grpc=127.0.0.1:{grpc}", "--pictures=1")
    assert answer.returncode == 0, answer.stderr
    scores = dict(re.findall(r"(HTTP|gRPC): \d+ of 360 right, accuracy ([\d.]+)%", answer.stdout))
    assert scores.keys() == {"HTTP", "gRPC"}
    assert all(float(score) > 95 for score in scores.values())
    assert answer.stdout.count("read as") == 1


def test_the_client_of_the_readme_reads_its_picture_as_a_three(ports: tuple[int, int]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert script.count("localhost:8000") == 1
    script = script.replace("localhost:8000", f"127.0.0.1:{ports[0]}")
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert re.match(r"\[\[b'0\.\d+:3:three' ", answer.stdout)


def test_classify_says_how_to_start_a_server_that_is_not_there() -> None:
    (port,) = free_ports(1)
    answer = run("classify.py", f"--http=127.0.0.1:{port}")
    assert answer.returncode == 1
    assert "penstock serve" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_training_again_gives_the_committed_weights(tmp_path: Path) -> None:
    """Equal numbers, not equal bytes: another release of onnx may write the same graph otherwise."""
    answer = run("train_digits.py", "--output", str(tmp_path / "model.onnx"))
    assert answer.returncode == 0, answer.stderr
    again, committed = (onnx.load(path).graph for path in (tmp_path / "model.onnx", MODEL))
    assert list(again.node) == list(committed.node)
    for one, other in zip(again.initializer, committed.initializer, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(onnx.numpy_helper.to_array(one), onnx.numpy_helper.to_array(other), atol=1e-3)


def test_the_committed_model_is_small() -> None:
    assert MODEL.stat().st_size < 200_000


def test_classify_answers_help_in_words() -> None:
    answer = run("classify.py", "--help")
    assert answer.returncode == 0
    assert "digits in a request" in answer.stdout
