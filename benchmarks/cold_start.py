"""Measure the seconds from the start of a server to its first right answer, by stage.

    python benchmarks/cold_start.py COMMAND... [--repository examples/models] [--runs 7] [--drop-caches]

COMMAND is the command before ``serve``, such as ``headrace``, ``./digits/headrace`` of a bundle, or ``chroot TREE
/opt/headrace/bin/headrace`` of an image. The repository has the model digits. ``--drop-caches`` empties the page cache
before each start, as root: then the files come from the disk.

==============  =====================================================================================
``server``      interpreter, imports of the server, and options: until the first port is listened on
``load``        import of the engine, and the load of the model: until the log says that it is loaded
``answer``      until the first answer, to a caller that retries every millisecond
==============  =====================================================================================

For comparison, ``python -c pass`` measures the interpreter alone. Prints medians, with minimum and maximum in brackets.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from machine import free_ports

MODELS = Path(__file__).resolve().parents[1] / "examples/models"
BODY = json.dumps({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 8, 8], "data": [0] * 64}]}).encode()
STAGES = {"server": "HTTPService listens at", "load": "successfully loaded"}


def start(command: list[str], repository: str) -> dict[str, float]:
    """Start a server, send requests until it answers, and stop it. Return the seconds of each stage."""
    http_port, grpc_port, metrics_port = free_ports(3)
    ports = [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    addresses = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
    seen: dict[str, float] = {}
    began = time.perf_counter()
    words = [*command, "serve", f"--model-repository={repository}", *ports, *addresses]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:

        def read() -> None:
            assert server.stderr is not None
            for line in server.stderr:
                for stage, text in STAGES.items():
                    if re.search(text, line):
                        seen.setdefault(stage, time.perf_counter() - began)

        reader = threading.Thread(target=read)
        reader.start()
        while server.poll() is None and not _answers(http_port):
            time.sleep(0.001)
        seen["answer"] = time.perf_counter() - began
        server.terminate()
        reader.join()
    if server.returncode:
        raise SystemExit(f"the server ended with {server.returncode}")
    return {
        "server": seen["server"],
        "load": seen["load"] - seen["server"],
        "answer": seen["answer"] - seen["load"],
        "together": seen["answer"],
    }


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v2/models/digits/infer", BODY)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            return False
        found = next(each for each in json.loads(text)["outputs"] if each["name"] == "probabilities")
        if abs(sum(found["data"]) - 1) > 1e-4:
            raise SystemExit(f"the answer is wrong: {found}")
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+")
    parser.add_argument("--repository", default=str(MODELS))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--drop-caches", action="store_true")
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        if arguments.drop_caches:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        runs.append(start(arguments.command, arguments.repository))
    for stage in runs[0]:
        values = sorted(run[stage] for run in runs)
        print(f"{stage:9} {statistics.median(values):6.2f} s  ({values[0]:.2f} to {values[-1]:.2f})")
    alone = []
    for _ in range(arguments.runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        alone.append(time.perf_counter() - began)
    print(f"interpreter alone {statistics.median(alone):.3f} s")


if __name__ == "__main__":
    main()
