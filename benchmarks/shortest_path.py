"""The fastest known server in Python: ``shortest_path.py MODEL.onnx PORT`` serves FP32 rows.

It is a yardstick, not a real server: no limits, no errors, no statistics, one model at every path. Batches form in
one thread. Needs ``httptools``.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
from typing import Any, NamedTuple, cast

import httptools
import numpy as np
import onnxruntime
import orjson
import uvloop

MAX_BATCH = 64
_Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Request(NamedTuple):
    connection: Connection
    inputs: _Arrays
    is_binary: bool


class Batcher(threading.Thread):
    """Runs all waiting requests together as soon as the previous batch has ended."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        self._waiting: collections.deque[Request] = collections.deque()
        self._count = threading.Semaphore(0)
        self._loop = loop

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._count.release()

    def run(self) -> None:
        while True:
            self._count.acquire()
            batch = [self._waiting.popleft()]
            while len(batch) < MAX_BATCH and self._count.acquire(blocking=False):
                batch.append(self._waiting.popleft())
            inputs = batch[0].inputs
            if len(batch) > 1:
                inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in inputs}
            self._loop.call_soon_threadsafe(self._answer, batch, self._session.run(self._names, inputs))

    def _answer(self, batch: list[Request], outputs: list[Any]) -> None:
        for row, request in enumerate(batch):
            answered = dict(zip(self._names, (output[row : row + 1] for output in outputs), strict=True))
            request.connection.answer(answered, request.is_binary)


class Connection(asyncio.Protocol):
    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._body = b""
        self._header_size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's class is no subclass
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"inference-header-content-length":
            self._header_size = int(value)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, offset = self._body, self._header_size
        self._body, self._header_size = b"", 0
        inputs, is_binary = {}, False
        for tensor in orjson.loads(body[:offset] if offset else body)["inputs"]:
            size = tensor.get("parameters", {}).get("binary_data_size")
            is_binary = size is not None
            if is_binary:
                array = np.frombuffer(body, np.float32, size // 4, offset)
                offset += size
            else:
                array = np.array(tensor["data"], np.float32)
            inputs[tensor["name"]] = array.reshape(tensor["shape"])
        self._batcher.submit(Request(self, inputs, is_binary))

    def answer(self, outputs: _Arrays, is_binary: bool) -> None:
        described: list[dict[str, Any]] = [
            {"name": name, "datatype": "FP32", "shape": output.shape} for name, output in outputs.items()
        ]
        buffers = []
        for document, output in zip(described, outputs.values(), strict=True):
            if is_binary:
                document["parameters"] = {"binary_data_size": output.nbytes}
                buffers.append(output.tobytes())
            else:
                document["data"] = output.ravel().tolist()
        head = orjson.dumps({"model_name": "tiny_add", "model_version": "1", "outputs": described})
        kind = b"application/octet-stream\r\nInference-Header-Content-Length: %d" % len(head)
        body = b"".join([head, *buffers])
        fields = (kind if is_binary else b"application/json", len(body))
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % fields + body)


async def main(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    batcher = Batcher(path, loop)
    batcher.start()
    server = await loop.create_server(lambda: Connection(batcher), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
