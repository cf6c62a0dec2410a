"""Compare tokens per second with an engine's own HTTP server: ``python benchmarks/text_generation.py [--engine vllm]``.

Both servers use the same library with the same model and settings: llama.cpp or vLLM. The same client reads events from
both: Headrace's generate_stream, and llama.cpp's /completion or vLLM's /v1/completions. They alternate, each in its own
processes. For the CPU beyond the engine, the library is also called in a bare process. All of them share the machine.

The model is SmolLM2-135M: `examples/chat/requirements.txt`. Needs headrace-generate, and headrace-llamacpp or
headrace-vllm (the session `vllm` of noxfile.py has that; run it there with ``nox -s vllm``, then this program with its
Python).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    """Run the engine alone, by a line to `text_engines.OwnServer.alone`."""
    assert process.stdin is not None
    begin, before = perf_counter(), cpu_s(process.pid)
    process.stdin.write("go\n")
    process.stdin.flush()
    answer_of(process, "engine done")
    took_s = perf_counter() - begin
    return Result(streams * tokens / took_s, 0.0, 1e6 * (cpu_s(process.pid) - before) / (streams * tokens))


@contextlib.contextmanager
def shifted_memory() -> Iterator[None]:
    """Change the size of the environment of new processes, and so the addresses of their allocations.

    The alignment of its buffers makes llama.cpp up to 8 % slower or faster. Settings and arguments change it, another
    start often does not. So without this, a ratio of two servers would compare two random alignments.
    """
    os.environ["SHIFT"] = "x" * random.randrange(4096)
    try:
        yield
    finally:
        del os.environ["SHIFT"]


def compare(engine: Engine, streams: int, tokens: int, runs: int, *, own_first: bool) -> dict[str, Result]:
    """Return the results of Headrace, of the engine's own server, and of the engine alone, from one start of all.

    ``own_first`` is the order in which they start and run: the first one may get slower memory.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights = engine.write_model(Path(folder), streams)
        if own_first:
            with shifted_memory():
                theirs = stack.enter_context(engine.own_server(weights, streams, tokens))
        with shifted_memory():
            ours = stack.enter_context(servers.headrace(Path(folder)))
        if not own_first:
            with shifted_memory():
                theirs = stack.enter_context(engine.own_server(weights, streams, tokens))
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        document = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(sampling)}
        path, body = "/v2/models/smol/generate_stream", json.dumps(document).encode()
        own_body = json.dumps(theirs.body).encode()
        measured: dict[str, Callable[[], Result]] = {
            "headrace": partial(measure, ours.pid, ours.http, path, body, streams, tokens),
            engine.name: partial(measure, theirs.pid, theirs.port, theirs.path, own_body, streams, tokens),
            ALONE: partial(in_process, theirs.alone, streams, tokens),
        }
        found: dict[str, list[Result]] = {name: [] for name in measured}
        for number in range(runs + 1):
            for name in reversed(measured) if own_first else measured:
                result = measured[name]()
                if number:  # the first one warms up
                    found[name].append(result)
        return {name: Result.of(each) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llamacpp", choices=("llamacpp", "vllm"))
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="of all servers; with few streams one says little")
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
        counts = [int(each) for each in options.streams.split(",")]
        return report(engine, counts, options.tokens, options.runs, options.starts)


def report(engine: Engine, counts: Sequence[int], tokens: int, runs: int, starts: int) -> int:
    """Print the results for each number of streams. Return 1 if a target is missed."""
    print("| streams | | tokens/s | p99 between tokens, ms | CPU for a token, µs |\n|---|---|---|---|---|")
    missed = 0
    for streams in counts:
        found: dict[str, list[Result]] = {}
        for number in range(starts):
            for name, result in compare(engine, streams, tokens, runs, own_first=number % 2 == 1).items():
                found.setdefault(name, []).append(result)
                print(f"| {streams} | {name} | {_cells(result)} |", flush=True)
        ours, own, alone = (Result.of(found[name]) for name in ("headrace", engine.name, ALONE))
        if starts > 1:
            for name, result in (("headrace", ours), (engine.name, own), (ALONE, alone)):
                print(f"| {streams} | {name}, median of {starts} starts | {_cells(result)} |")
        rate, p99, beyond = ours.rate / own.rate, ours.p99_ms / own.p99_ms, ours.cpu_us - alone.cpu_us
        line = f"rate {rate:.2f}, p99 {p99:.2f} of {engine.name}'s own; {beyond:.0f} µs of CPU beyond the engine"
        print(f"{streams} streams: {line}", flush=True)
        missed += rate < TARGET_RATE or p99 > TARGET_P99
    return int(missed > 0)


def _cells(result: Result) -> str:
    return f"{result.rate:.1f} | {result.p99_ms:.1f} | {result.cpu_us:.0f}"


if __name__ == "__main__":
    sys.exit(main())
