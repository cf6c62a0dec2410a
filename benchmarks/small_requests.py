"""The cost of a small request, compared with the fastest server in Python, and with the real Triton."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import load
import servers
from measure import Case, Run, as_json, compare, median
from report import LOAD_COLUMNS, Section, Target, load_row
from servers import Running
from settings import Settings, need_modules, need_wrk

#: The model on each server.
IDENTITIES = {"headrace": "identity", "triton": "pyident"}
INPUTS = ("INPUT0", "INPUT1")
SERVER_CPU_US = 60
RATE = 20_000
#: The rate of the prototype when `RATE` was the target.
PROTOTYPE_RATE = 48_000
SHARE_OF_PROTOTYPE = 0.6


def tiny_add(settings: Settings) -> Section:
    """A two-input ONNX add of 16 floats over HTTP, compared with shortest_path.py."""
    need_wrk()
    need_modules("httptools")
    section = Section("tiny_add over HTTP: Headrace and the prototype", LOAD_COLUMNS)
    bodies = {
        "binary": load.binary_body("tiny_add", dict.fromkeys(INPUTS, (1, 16))),
        "JSON": load.json_body("tiny_add", dict.fromkeys(INPUTS, 16)),
    }
    with tempfile.TemporaryDirectory() as folder:
        repository = settings.repository(Path(folder), "tiny_add")
        with (
            servers.headrace(repository) as headrace,
            servers.prototype(repository / "tiny_add" / "1" / "model.onnx") as prototype,
        ):
            for form, body in bodies.items():
                for connections in (16, 1):
                    name = f"tiny_add {form}, {connections} connections"
                    case = Case(name, lambda server: "tiny_add", partial(_wrk, body, connections))
                    found = compare(case, [headrace, prototype], settings.runs, settings.seconds)
                    section.rows += [load_row(case.name, name, runs) for name, runs in found.items()]
                    section.raw[case.name] = as_json(found)
                    if connections == 16:
                        section.targets += _targets(case.name, found)
    return section


def _wrk(body: load.Body, connections: int, server: Running, seconds: float) -> load.Seen:
    return load.wrk(server, body, connections, seconds)


def _perf_analyzer(program: Path, protocol: str, connections: int, server: Running, seconds: float) -> load.Seen:
    model = IDENTITIES[server.name]
    words, varied = ("--shape", "INPUT0:16"), {"INPUT0": (16,)}
    return load.perf_analyzer(program, server, protocol, model, connections, seconds, *words, varied=varied)


def _targets(name: str, found: dict[str, list[Run]]) -> list[Target]:
    ours, theirs = median(found["headrace"], "rps"), median(found["prototype"], "rps")
    cpu_us = median(found["headrace"], "server_us")
    rate = RATE * theirs / PROTOTYPE_RATE
    return [
        Target(f"{name}: server CPU", f"<= {SERVER_CPU_US} µs/request", f"{cpu_us:.1f}", cpu_us <= SERVER_CPU_US),
        Target(
            f"{name}: rate",
            f">= {rate:,.0f}/s ({RATE:,}/s where the prototype gives {PROTOTYPE_RATE:,}; here {theirs:,.0f})",
            f"{ours:,.0f}",
            ours >= rate,
        ),
        Target(
            f"{name}: share of the prototype",
            f">= {SHARE_OF_PROTOTYPE:.0%}",
            f"{ours / theirs:.0%}",
            ours / theirs >= SHARE_OF_PROTOTYPE,
        ),
    ]


def pyident(settings: Settings) -> Section:
    """Headrace's identity backend, compared with the real Triton's Python identity, over HTTP and gRPC."""
    analyzer = settings.yardstick("perf_analyzer")
    settings.yardstick("tritonserver")
    section = Section("identity of 16 floats: Headrace and Triton (pyident)", LOAD_COLUMNS)
    with (
        tempfile.TemporaryDirectory() as ours,
        tempfile.TemporaryDirectory() as theirs,
        servers.headrace(settings.repository(Path(ours), "identity")) as headrace,
        servers.triton(settings.yardsticks, settings.repository(Path(theirs), "pyident")) as triton,
    ):
        for protocol in ("http", "grpc"):
            for connections in (1, 16):
                case = Case(
                    f"identity {protocol}, {connections} connections",
                    lambda server: IDENTITIES[server.name],
                    partial(_perf_analyzer, analyzer, protocol, connections),
                )
                found = compare(case, [headrace, triton], settings.runs, settings.seconds)
                section.rows += [load_row(case.name, name, runs) for name, runs in found.items()]
                section.raw[case.name] = as_json(found)
                section.targets += _beside_triton(case.name, protocol, connections, found)
    return section


def _beside_triton(name: str, protocol: str, connections: int, found: dict[str, list[Run]]) -> list[Target]:
    ratios = {
        field: median(found["headrace"], field) / median(found["triton"], field) for field in ("p50_us", "server_us")
    }
    targets = []
    if connections == 1:
        is_met = ratios["p50_us"] < 1 or protocol == "grpc"
        targets.append(Target(f"{name}: p50, ratio to Triton", _wanted(protocol), f"{ratios['p50_us']:.2f}", is_met))
    is_met = ratios["server_us"] <= 1 or protocol == "grpc"
    targets.append(
        Target(f"{name}: server CPU, ratio to Triton", _wanted(protocol), f"{ratios['server_us']:.2f}", is_met)
    )
    return targets


def _wanted(protocol: str) -> str:
    return "<= 1" if protocol == "http" else "reported"
