"""Test that unloads return the memory of a model: measure a server that loads and unloads one repeatedly.

    python benchmarks/unload.py [ENGINE ...] [--cycles 1000] [--svg FILE]

Each cycle loads the model by name, sends one request, and unloads it. The model is ``digits`` of networks.py (``mlp``
for an engine without it); ``python`` is an identity in Python. After a warm-up of a tenth of the cycles, the memory of
the whole process tree is read 20 times, each after an unload. Prints a curve as text, and writes a picture with
``--svg``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import machine
import numpy as np
import servers
from frameworks import FRAMEWORKS, installed
from networks import SHAPES

PYTHON = "python"
#: The most that memory may grow by after the warm-up, as a share.
WANTED = 0.05
#: A sample is taken when memory has not changed by 1 MiB for this time, in s, within which an idle server collects
#: garbage; at the latest after the second time.
SETTLES_S, PATIENCE_S = 3.0, 20.0
COLUMNS, ROWS = 60, 8
_PYTHON_CONFIG = """backend: "python" max_batch_size: 8
instance_group { kind: KIND_CPU count: 1 }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 64 ] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 64 ] }
"""
_PYTHON_MODEL = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.as_numpy())]) for each in inputs]
"""


@dataclass(slots=True)
class Curve:
    """Memory in MiB after so many cycles."""

    engine: str
    cycles: list[int] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """The growth from the end of the warm-up to the end, as a share."""
        return self.mib[-1] / self.mib[0] - 1

    def __str__(self) -> str:
        is_met = "" if self.growth <= WANTED else ", which is too much"
        return (
            f"{self.engine}: {self.cycles[-1]} cycles in {self.seconds:.0f} s, {self.mib[0]:.1f} MiB after "
            f"{self.cycles[0]}, {self.mib[-1]:.1f} at the end, {self.growth:+.1%}{is_met}"
        )


def network_of(engine: str) -> str:
    return "digits" if engine == PYTHON or "digits" in FRAMEWORKS[engine].networks else FRAMEWORKS[engine].networks[0]


def write(engine: str, folder: Path) -> None:
    """Write the model ``m`` of ``engine``."""
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    if engine == PYTHON:
        (version / "model.py").write_text(_PYTHON_MODEL)
        (version.parent / "config.pbtxt").write_text(_PYTHON_CONFIG)
        return
    framework, network = FRAMEWORKS[engine], network_of(engine)
    framework.write(network, version)
    (version.parent / "config.pbtxt").write_text(framework.config_of(network, 1, framework.threads_of(1, 1)))


class Client:
    """Loads the model ``m``, sends a request to it, and unloads it."""

    def __init__(self, port: int, shape: Sequence[int]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        rows = np.zeros((1, *shape), np.float32)
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": rows.shape, "data": rows.ravel().tolist()}
        self._request = json.dumps({"inputs": [tensor]})

    def post(self, path: str, body: str = "{}") -> bytes:
        self._connection.request("POST", path, body)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {content[:500]!r}")
        return content

    def cycle(self) -> None:
        self.post("/v2/repository/models/m/load")
        self.post("/v2/models/m/infer", self._request)
        self.post("/v2/repository/models/m/unload")

    def is_unloaded(self) -> bool:
        lines: list[Mapping[str, str]] = json.loads(self.post("/v2/repository/index"))
        return all(line.get("state") != "UNLOADING" for line in lines)


def settled_mib(pid: int, is_unloaded: Callable[[], bool]) -> float:
    """Return the memory of the server when the last unload has ended, and it no longer changes."""
    began = time.monotonic()
    while not is_unloaded():
        time.sleep(0.02)
    now, since = machine.rss_mib(pid), time.monotonic()
    while time.monotonic() - since < SETTLES_S and time.monotonic() - began < PATIENCE_S:
        time.sleep(0.1)
        before, now = now, machine.rss_mib(pid)
        if abs(now - before) > 1:
            since = time.monotonic()
    return now


def measure(engine: str, folder: Path, cycles: int, samples: int = 20) -> Curve:
    """Return the memory of a server over ``cycles`` cycles, the first of which is after a tenth."""
    curve = Curve(engine)
    shape = SHAPES[network_of(engine)]
    plugin = PYTHON if engine == PYTHON else FRAMEWORKS[engine].backend
    flags = (f"--plugins={plugin}", "--model-control-mode=explicit", "--log-info=false")
    with servers.headrace(folder, *flags) as server:
        client = Client(server.http, shape)
        began = time.monotonic()
        due = [cycles // 10 + (cycles - cycles // 10) * part // (samples - 1) for part in range(samples)]
        for number in range(1, cycles + 1):
            client.cycle()
            if number in due:
                curve.cycles.append(number)
                curve.mib.append(settled_mib(server.pid, client.is_unloaded))
                shown = f"\r{engine}: {number} of {cycles} cycles, {curve.mib[-1]:.1f} MiB, {curve.growth:+.1%}  "
                print(shown, end="", file=sys.stderr, flush=True)
        curve.seconds = time.monotonic() - began
    print(file=sys.stderr)
    return curve


def text_plot(curve: Curve) -> str:
    """Return the curve as lines of text, from 0 to the most memory."""
    top = max(curve.mib) * 1.1
    marks = {
        (round((count - curve.cycles[0]) / max(curve.cycles[-1] - curve.cycles[0], 1) * (COLUMNS - 1)),
         round(mib / top * (ROWS - 1)))
        for count, mib in zip(curve.cycles, curve.mib, strict=True)
    }  # fmt: skip
    lines = [
        f"{top * row / (ROWS - 1):7.0f} |"
        + "".join("*" if (column, row) in marks else " " for column in range(COLUMNS))
        for row in reversed(range(ROWS))
    ]
    scale = f"{curve.cycles[0]}".ljust(COLUMNS - len(str(curve.cycles[-1]))) + f"{curve.cycles[-1]}"
    return "\n".join((*lines, "    MiB +" + "-" * COLUMNS, " " * 9 + scale + " cycles"))


def svg(curves: Sequence[Curve]) -> str:
    """Return the curves in one picture: memory over that after the warm-up."""
    width, height, margin = 720, 320, 50
    most = max(max(curve.mib) / curve.mib[0] for curve in curves) * 1.05
    end = max(curve.cycles[-1] for curve in curves)
    colours = ("#1b6ca8", "#c0392b", "#27ae60", "#8e44ad", "#d35400", "#16a085", "#7f8c8d", "#2c3e50")

    def place(count: int, share: float) -> str:
        x = margin + (width - 2 * margin) * count / end
        return f"{x:.1f},{height - margin - (height - 2 * margin) * share / most:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    for share in (0, 0.5, 1, 1 + WANTED):
        start, stop = place(0, share), place(end, share)
        parts.append(f'<polyline points="{start} {stop}" stroke="#ddd" fill="none"/>')
        x, y = start.split(",")
        parts.append(f'<text x="{float(x) - 6}" y="{y}" font-size="10" text-anchor="end">{share:.2f}</text>')
    for number, curve in enumerate(curves):
        colour = colours[number % len(colours)]
        points = " ".join(place(n, mib / curve.mib[0]) for n, mib in zip(curve.cycles, curve.mib, strict=True))
        parts.append(f'<polyline points="{points}" stroke="{colour}" fill="none" stroke-width="1.5"/>')
        label = f'<text x="{margin + 8}" y="{height - margin - 8 - 14 * number}" font-size="11" fill="{colour}">'
        parts.append(f"{label}{curve.engine} ({curve.mib[0]:.0f} MiB)</text>")
    parts.append(f'<text x="{width / 2}" y="{height - 12}" font-size="12" text-anchor="middle">cycles, to {end}</text>')
    return "\n".join((*parts, "</svg>\n"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = [*installed(), PYTHON]
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(engines)}; all unless given")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--write", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.engines[0], arguments.write)
        return 0
    curves = []
    for engine in arguments.engines or engines:
        with tempfile.TemporaryDirectory() as folder:
            # in another process: an engine keeps its threads
            subprocess.run([sys.executable, __file__, engine, "--write", folder], check=True)
            curves.append(measure(engine, Path(folder), arguments.cycles))
        print(curves[-1], text_plot(curves[-1]), sep="\n", flush=True)
    if arguments.svg:
        arguments.svg.write_text(svg(curves))
    return int(any(curve.growth > WANTED for curve in curves))


if __name__ == "__main__":
    sys.exit(main())
