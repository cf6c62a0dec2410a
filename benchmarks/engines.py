"""Headrace beside ONNX Runtime called in a loop with the batch sizes that Headrace ran."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import load
import servers
from measure import Case, Run, as_json, compare, median
from report import LOAD_COLUMNS, Section, Target, load_row
from settings import Settings, need_wrk

CONNECTIONS = 16
SHARE_OF_DIRECT = 0.95
SHAPES = {"mlp": (256,), "convnet": (3, 224, 224)}
#: A batch of the convnet takes about a second: a run must hold many.
LENGTHS = {"mlp": 1, "convnet": 4}
#: As the models' config.pbtxt says.
THREADS = 1


def engines(settings: Settings) -> Section:
    """mlp and convnet over HTTP at 16 connections."""
    need_wrk()
    section = Section("ONNX models: Headrace and ONNX Runtime called directly", LOAD_COLUMNS)
    for model, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            repository = settings.repository(Path(folder), model)
            _model(settings, section, model, shape, repository)
    return section


def _model(settings: Settings, section: Section, model: str, shape: tuple[int, ...], repository: Path) -> None:
    body = load.binary_body(model, {"INPUT0": (1, *shape)})
    case = Case(
        f"{model} binary, {CONNECTIONS} connections",
        lambda server: model,
        lambda server, seconds: load.wrk(server, body, CONNECTIONS, seconds),
    )
    seconds = settings.seconds * LENGTHS[model]
    ours: list[Run] = []
    direct: list[float] = []
    session = _session(repository / model / "1" / "model.onnx")
    with servers.headrace(repository) as headrace:
        for _ in range(settings.runs):
            [run] = compare(case, [headrace], 1, seconds)["headrace"]
            ours.append(run)
            direct.append(_rows_per_second(session, shape, run.batches, seconds))
    share = sorted(run.rps / rate for run, rate in zip(ours, direct, strict=True))[len(ours) // 2]
    section.rows.append(load_row(case.name, "headrace", ours))
    rate = sorted(direct)[len(direct) // 2]
    spread = f"{rate:,.0f} ({min(direct):,.0f}..{max(direct):,.0f})"
    batch = f"{median(ours, 'batch'):.1f}"
    section.rows.append((case.name, "ONNX Runtime in a loop", spread, "", "", "", "", batch, ""))
    section.raw[case.name] = {"direct_rows_per_second": direct, **as_json({"headrace": ours})}
    section.targets.append(
        Target(
            f"{case.name}: share of ONNX Runtime alone",
            f">= {SHARE_OF_DIRECT:.0%}",
            f"{share:.1%}",
            share >= SHARE_OF_DIRECT,
        )
    )


def _session(path: Path):  # type: ignore[no-untyped-def]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = THREADS
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _rows_per_second(session, shape: Sequence[int], batches: dict[str, int], seconds: float) -> float:  # type: ignore[no-untyped-def]
    """Rows per second over ``seconds`` of batches, their sizes in the proportions of ``batches``."""
    import numpy as np

    total = sum(batches.values())
    inputs = {int(size): np.zeros((int(size), *shape), np.float32) for size in batches}
    # The least frequent size once or more per round, the others in proportion, a round of about 100.
    sizes = [int(size) for size, count in batches.items() for _ in range(max(1, round(100 * count / total)))]
    for array in inputs.values():
        session.run(None, {"INPUT0": array})
    started, rows = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for size in sizes:
            session.run(None, {"INPUT0": inputs[size]})
            rows += size
            if time.perf_counter() - started > seconds:
                break
    return rows / (time.perf_counter() - started)
