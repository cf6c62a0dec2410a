"""Two models of one server on one GPU: each alone, and both under load at once.

The sum of the two shares is the throughput of sharing: 100 % if the GPU does as much work as before. Needs a CUDA
device, ``wrk``, and PyTorch or ``onnxruntime-gpu``.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import frameworks
import load
import servers
from frameworks import write_networks
from gpu import device_name
from networks import SHAPES
from report import Section
from servers import Running
from settings import Missing, Settings, need_modules, need_wrk

CONNECTIONS = 16
NETWORK = "large_transformer"
COLUMNS = ("models", "model", "alone, requests/s", "beside the other", "share", "p99 ms alone", "p99 ms beside")


def gpu_pair(settings: Settings) -> Section:
    """The large transformer on two engines, or twice on the only one."""
    need_wrk()
    need_modules("onnx")
    section = Section(f"Two models on one GPU ({device_name()})", COLUMNS)
    installed = frameworks.installed("KIND_GPU")
    if not installed:
        raise Missing("an engine for GPUs")
    with tempfile.TemporaryDirectory() as made:
        folder = write_networks(Path(made), installed)
        pair = [f"{NETWORK}_{engine}" for engine in installed][:2]
        if len(pair) == 1:
            pair.append(f"{pair[0]}_again")
            (folder / pair[1]).symlink_to(folder / pair[0])
        loads = [f"--load-model={model}" for model in pair]
        with servers.headrace(folder, "--model-control-mode=explicit", *loads) as server:
            _measure(settings, section, server, pair)
    return section


def _measure(settings: Settings, section: Section, server: Running, pair: list[str]) -> None:
    alone: dict[str, list[load.Seen]] = {model: [] for model in pair}
    beside: dict[str, list[load.Seen]] = {model: [] for model in pair}
    for model in pair:
        _put(server, model, 1)
    with ThreadPoolExecutor(len(pair)) as threads:
        for _ in range(settings.runs):
            for model in pair:
                alone[model].append(_put(server, model, settings.seconds))
            at_once = [threads.submit(_put, server, model, settings.seconds) for model in pair]
            for model, each in zip(pair, at_once, strict=True):
                beside[model].append(each.result())
    for model in pair:
        before = median(each.rps for each in alone[model])
        after = median(each.rps for each in beside[model])
        tails = [median(each.p99_us for each in runs) / 1e3 for runs in (alone[model], beside[model])]
        section.rows.append(
            (
                " and ".join(pair), model, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.0%}",
                f"{tails[0]:.2f}", f"{tails[1]:.2f}",
            )
        )  # fmt: skip
        section.raw[model] = {
            "alone": [each.rps for each in alone[model]],
            "beside": [each.rps for each in beside[model]],
        }


def _put(server: Running, model: str, seconds: float) -> load.Seen:
    shape = f"INPUT0:{','.join(map(str, (1, *SHAPES[NETWORK])))}"
    return load.wrk(server, load.Body(model, b""), CONNECTIONS, seconds, load.VARIED, 4, ("binary", shape))
