"""Thousands of callers that cancel at random: tests that no response is lost or doubled, and that memory is freed.

    python benchmarks/cancellations.py [--requests 10000] [--rounds 3] [--http-server hypercorn] [--grpc-server grpcio]

64 callers at a time send requests over HTTP and gRPC to models that execute for a few milliseconds: one that batches,
one with priorities and short queue timeouts, one with a response cache, and one that calls the first for each request.
Three in four cancel after a random time, while the request waits, executes, or is answered: they close the connection,
cancel the call, or set a deadline. At the end of each round no request may wait, every caller must have had one end,
and the server must be alive. Its memory is printed, and should be constant from the second round on. Exits with 1 after
a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import psutil
from tritonclient.grpc import service_pb2

AT_ONCE = 64
#: The limit for the end of a request.
PATIENCE_S = 15
SHAPES = (
    """input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }"""
)
QUEUE = (
    "dynamic_batching { priority_levels: 2 default_priority_level: 2 default_queue_policy { timeout_action: REJECT "
    "default_timeout_microseconds: 8000 allow_timeout_override: true max_queue_size: 200 } "
    "priority_queue_policy { key: 2 value { timeout_action: DELAY default_timeout_microseconds: 3000 } } }"
)
CONFIGS = {
    "batches": f'backend: "python" max_batch_size: 8 {SHAPES} dynamic_batching {{ max_queue_delay_microseconds: 500 }}',
    "limited": f'backend: "python" max_batch_size: 8 {SHAPES} {QUEUE}',
    "cached": f'backend: "python" max_batch_size: 8 {SHAPES} response_cache {{ enable: true }}',
    "asks": f'backend: "python" max_batch_size: 8 {SHAPES} instance_group {{ count: 4 kind: KIND_CPU }}',
}
TAKES_TIME = """
import random, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(random.random() * 0.004)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy())])
            for each in requests
        ]
"""
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for each in requests:
            x = pb_utils.get_input_tensor_by_name(each, "x")
            inner = pb_utils.InferenceRequest(model_name="batches", requested_output_names=["y"], inputs=[x])
            answer = inner.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "y")]))
        return responses
"""
#: The shares of callers, by how they cancel.
WAYS = ("stays", "leaves", "deadline", "timeout")


def write_models(folder: Path) -> None:
    for name, config in CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text(ASKS if name == "asks" else TAKES_TIME)


class Served:
    """``headrace serve``, its ports, and its page of metrics."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until `stop`)
        program = Path(sys.executable).with_name("headrace")
        ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--http-address=127.0.0.1"]
        self.process = subprocess.Popen(
            [program, "serve", f"--model-repository={folder}", "--cache-config=local,size=100000", *ports,
             "--grpc-address=127.0.0.1", *words],
            stdout=subprocess.DEVNULL, stderr=self._log,
        )  # fmt: skip
        try:
            self.http, self.grpc, self.metrics = self._ports()
        except BaseException:
            self.stop()
            raise

    def _ports(self) -> tuple[int, int, int]:
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            named = dict(re.findall(r"Started (HTTP|GRPC|Metrics)\w* ?\w* at \S+:(\d+)", self.log))
            found = [int(named[what]) for what in ("HTTP", "GRPC", "Metrics") if what in named]
            if len(found) == 3:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{found[0]}/v2/health/ready").close()
                    return found[0], found[1], found[2]
            time.sleep(0.1)
        raise SystemExit(f"the server does not start:\n{self.log}")

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def metric(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(f"{name}{{"))

    @property
    def rss_mib(self) -> float:
        own = psutil.Process(self.process.pid)
        rss: int = sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))
        return rss / (1 << 20)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


class Callers:
    """The callers: each has one end, which ``ends`` counts."""

    def __init__(self, served: Served, chance: random.Random) -> None:
        self.served, self.chance = served, chance
        self.ends: Counter[str] = Counter()
        self.lost: list[str] = []

    async def call(self, stub: Any) -> None:
        way, model = self.chance.choice(WAYS), self.chance.choice(list(CONFIGS))
        x = [float(self.chance.randrange(50))] * 4
        after_s = self.chance.random() * 0.02
        over = self.chance.choice((self._over_http, self._over_grpc))
        try:
            end = await asyncio.wait_for(over(stub, way, model, x, after_s), PATIENCE_S)
        except asyncio.TimeoutError:
            waiting = self.served.metric("nv_inference_pending_request_count")
            self.lost.append(f"{over.__name__} of '{model}' ({way}) has no end; {waiting} requests wait in the server")
            return
        self.ends[f"{way}: {end}"] += 1

    async def _over_http(self, stub: Any, way: str, model: str, x: list[float], after_s: float) -> str:
        document: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": x}]}
        if way == "timeout":
            document["parameters"] = {"timeout": int(after_s * 1e6), "priority": 1}
        body = json.dumps(document)
        deadline = f"Request-Timeout-Ms: {int(after_s * 1000) + 1}\r\n" if way == "deadline" else ""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.served.http)
        try:
            head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n{deadline}Content-Length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            if way == "leaves":
                await asyncio.sleep(after_s)
                writer.transport.abort()
                return "left"
            status = (await reader.readline()).split()[1]
            return f"HTTP {status.decode()}"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _over_grpc(self, stub: Any, way: str, model: str, x: list[float], after_s: float) -> str:
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
        tensor.contents.fp32_contents.extend(x)
        request = service_pb2.ModelInferRequest(model_name=model, inputs=[tensor])
        if way == "timeout":
            request.parameters["timeout"].int64_param = int(after_s * 1e6)
            request.parameters["priority"].int64_param = 1
        call = stub(request, timeout=max(after_s, 0.001) if way == "deadline" else None)
        if way == "leaves":
            await asyncio.sleep(after_s)
            return "left" if call.cancel() else "answered before"
        try:
            await call
            return "gRPC OK"
        except grpc.aio.AioRpcError as error:
            return f"gRPC {error.code().name}"


async def ask(callers: Callers, requests: int) -> None:
    served = callers.served
    numbers = iter(range(requests))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc}") as channel:
        stub = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )

        async def keep_asking() -> None:
            for _ in numbers:
                await callers.call(stub)

        await asyncio.gather(*(keep_asking() for _ in range(AT_ONCE)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--http-server", default="native")
    parser.add_argument("--grpc-server", default="native")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(f"seed {options.seed}")
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        hosts = [f"--http-server={options.http_server}", f"--grpc-server={options.grpc_server}"]
        served = Served(Path(folder), [*hosts, "--backend-config=python,isolation=thread"])
        try:
            for number in range(options.rounds):
                begun = time.monotonic()
                callers = Callers(served, chance)
                asyncio.run(ask(callers, options.requests))
                ends = callers.ends
                wrong += [f"round {number}: {text}" for text in callers.lost]
                deadline = time.monotonic() + 30
                while (pending := served.metric("nv_inference_pending_request_count")) and time.monotonic() < deadline:
                    time.sleep(0.1)
                if pending:
                    wrong.append(f"round {number}: {pending} requests still wait")
                if ends.total() != options.requests:
                    wrong.append(f"round {number}: {ends.total()} ends of {options.requests} requests")
                if served.process.poll() is not None:
                    wrong.append(f"round {number}: the server has ended")
                    break
                failed, succeeded = (served.metric(f"nv_inference_request_{what}") for what in ("failure", "success"))
                took = time.monotonic() - begun
                print(f"round {number}: {took:.0f} s, {served.rss_mib:.1f} MiB; success {succeeded}, failure {failed}")
                print("   ", ", ".join(f"{name} {count}" for name, count in sorted(ends.items())))
            if "Traceback" in served.log:
                wrong.append(served.log[served.log.index("Traceback") :][:3000])
        finally:
            served.stop()
    for line in wrong:
        print("WRONG:", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
