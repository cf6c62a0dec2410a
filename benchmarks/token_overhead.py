"""Measure the cost of a request and a token beyond the engine: ``token_overhead.py [--streams 1,16,64,256]``.

The engine of `pretend_engine` computes nothing and writes one token to every stream at each step. So all the CPU of the
server is overhead. It is measured over HTTP (generate_stream, and OpenAI's chats), gRPC (ModelStreamInfer) and in the
process of the server (`Engine.responses`), for an instance in a thread and in its own process. The clients run in
another process. A token is a response: if the server is too slow for the rate, the run fails. Needs headrace-generate,
headrace-openai and headrace-llm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

import grpc
import machine
import numpy as np
import pretend_engine
import servers
from event_streams import read_events
from tritonclient.grpc import service_pb2 as pb

from headrace import InferRequest, Server

STREAMS = (1, 16, 64, 256)
#: The length of the streams of one measurement in seconds, and the tokens of all of them per second.
LENGTH_S, TOKENS_PER_S = 2.0, 3200
REQUESTS = 400
#: The targets at 16 streams: CPU for each token, and for each request without its token.
TARGET_TOKEN_US, TARGET_REQUEST_US = 100.0, 1000.0
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def step_ms(streams: int) -> float:
    """Return the step at which ``streams`` have `TOKENS_PER_S` tokens together; at least 5 ms."""
    return max(5.0, 1000 * streams / TOKENS_PER_S)


async def http(port: int, model: str, streams: int, tokens: int, requests: int) -> int:
    """Read ``streams`` streams at once, ``requests`` times. Return the number of responses."""
    document = {"text_input": "Once upon", "stream": True, "sampling_parameters": f'{{"max_tokens": {tokens}}}'}
    return await read_events(port, f"/v2/models/{model}/generate_stream", document, streams, requests)


async def openai(port: int, model: str, streams: int, tokens: int, requests: int) -> int:
    """Do as `http`, by OpenAI's chats. Chunks without a token are not counted."""
    document = {"model": model, "messages": [{"role": "user", "content": "Once"}], "stream": True, "max_tokens": tokens}
    return await read_events(port, "/v1/chat/completions", document, streams, requests, b'{"content":')


async def grpc_streams(port: int, model: str, streams: int, tokens: int, requests: int) -> int:
    """Do as `http`, over gRPC; 16 streams share a connection."""
    sent = pb.ModelInferRequest(model_name=model)
    sent.parameters["max_tokens"].int64_param = tokens
    for name, datatype, raw in (("text_input", "BYTES", b"\x09\0\0\0Once upon"), ("stream", "BOOL", b"\1")):
        sent.inputs.add(name=name, datatype=datatype, shape=[1])
        sent.raw_input_contents.append(raw)
    body = sent.SerializeToString()
    aio: Any = grpc.aio
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(-(-streams // 16))]

    async def one(place: int) -> int:
        call = channels[place // 16].stream_stream(_METHOD)()
        count = 0
        for _ in range(requests):
            await call.write(body)
            for _ in range(tokens):
                received = await call.read()
                if received is aio.EOF:
                    raise RuntimeError("the server ended the stream")
                count += 1
        await call.done_writing()
        return count

    counts = await asyncio.gather(*(one(place) for place in range(streams)))
    for channel in channels:
        await channel.close()
    return sum(counts)


def served(folder: str, reader: str, isolation: str, streams: int) -> tuple[float, float]:
    """Return the CPU in µs of a server, in its own process, for each token, and for each request."""
    os.environ["PYTHONPATH"] = folder
    read: Callable[..., Coroutine[Any, Any, int]] = {"http": http, "openai": openai, "grpc": grpc_streams}[reader]
    pace = step_ms(streams)
    model, quick = f"{isolation}-{pace:g}", f"{isolation}-1"
    with servers.headrace(Path(folder) / "models", "--model-control-mode=explicit", f"--load-model={model}",
                          f"--load-model={quick}") as running:  # fmt: skip
        port = running.grpc if reader == "grpc" else running.http

        def cost(model: str, tokens: int, requests: int) -> float:
            before = machine.read(running.pid).tree_s
            count = asyncio.run(read(port, model, streams, tokens, requests))
            if count != streams * tokens * requests:
                raise SystemExit(f"{reader}: {count} responses instead of {streams * tokens * requests}")
            return machine.read(running.pid).tree_s - before

        cost(quick, 1, 2)
        tokens, requests = max(20, int(LENGTH_S * 1000 / pace)), max(4, REQUESTS // streams)
        token_us = 1e6 * cost(model, tokens, 1) / streams / tokens
        return token_us, 1e6 * cost(quick, 1, requests) / streams / requests - token_us


def in_process(folder: str, isolation: str, streams: int) -> tuple[float, float]:
    """Do as `served` by `Engine.responses` in the process of the server: the CPU of both, without children."""
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder  # for the process of the model
    pace = step_ms(streams)
    options = {"model_control_mode": "explicit", "load_model": (f"{isolation}-{pace:g}", f"{isolation}-1")}
    with Server(str(Path(folder) / "models"), **options) as server:

        async def read(model: str, tokens: int, requests: int) -> int:
            inputs = {"text_input": np.array(["Once upon"], object), "stream": np.array([True])}

            async def one() -> int:
                count = 0
                for _ in range(requests):
                    request = InferRequest(model, inputs, parameters={"max_tokens": tokens})
                    async for _ in server.engine.responses(request):
                        count += 1
                return count

            return sum(await asyncio.gather(*(one() for _ in range(streams))))

        def cost(model: str, tokens: int, requests: int) -> float:
            before = process_time()
            count: int = server._call(lambda: read(model, tokens, requests))
            if count != streams * tokens * requests:
                raise SystemExit(f"in process: {count} responses instead of {streams * tokens * requests}")
            return process_time() - before

        cost(f"{isolation}-1", 1, 2)
        tokens, requests = max(20, int(LENGTH_S * 1000 / pace)), max(4, REQUESTS // streams)
        token_us = 1e6 * cost(f"{isolation}-{pace:g}", tokens, 1) / streams / tokens
        return token_us, 1e6 * cost(f"{isolation}-1", 1, requests) / streams / requests - token_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--readers", default="http,openai,grpc,engine")
    parser.add_argument("--isolations", default="thread,process")
    arguments = parser.parse_args()
    counts, missed = [int(each) for each in arguments.streams.split(",")], False
    with tempfile.TemporaryDirectory() as name, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pretend_engine.install(Path(name))
        pretend_engine.repository(Path(name), sorted({1.0, *map(step_ms, counts)}))
        for isolation in arguments.isolations.split(","):
            for reader in arguments.readers.split(","):
                for streams in counts:
                    if reader == "engine":
                        token_us, request_us = pool.apply(in_process, (name, isolation, streams))
                    else:
                        token_us, request_us = pool.apply(served, (name, reader, isolation, streams))
                    print(
                        f"{isolation:8}{reader:7}{streams:4} streams: {token_us:6.1f} µs a token, "
                        f"{request_us:6.0f} µs a request", flush=True,
                    )  # fmt: skip
                    missed |= streams == 16 and (token_us > TARGET_TOKEN_US or request_us > TARGET_REQUEST_US)
    sys.exit(missed)


if __name__ == "__main__":
    main()
