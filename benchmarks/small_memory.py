"""A server with a model of 100 MB in little memory, under the load of 64 callers.

    python benchmarks/small_memory.py [--limit-mib 512] [--callers 64] [--seconds 15] [--cgroup /sys/fs/cgroup/memory]

A control group (version 1 or 2, as root) limits the server; without swap, the kernel kills a process that needs more.
Prints one line per setting: the most memory of the group, of which the kernel can reclaim the page cache, the most
resident memory of the server, requests per second, and failures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from machine import free_ports

MIB = 1 << 20
WIDTH = 5120  #: rows and columns of a matrix of 100 MiB
PLAIN, LEAN = {}, {"MALLOC_ARENA_MAX": "2"}  # type: dict[str, str], dict[str, str]
SETTINGS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "default": (PLAIN, ""),
    "MALLOC_ARENA_MAX=2": (LEAN, ""),
    "MALLOC_ARENA_MAX=2, no arena of ONNX Runtime": (
        LEAN, 'parameters { key: "enable_mem_arena" value { string_value: "0" } }'
    ),
}  # fmt: skip


def write_model(folder: Path, parameters: str) -> None:
    """One matrix product, with its weights in the file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32), "W")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("X", "Y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["X", "W"], ["Y"])], "g", infos[:1], infos[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "big/1").mkdir(parents=True)
    onnx.save(model, str(folder / "big/1/model.onnx"))
    config = f'backend: "onnxruntime" max_batch_size: 8 dynamic_batching {{}} {parameters}'
    (folder / "big/config.pbtxt").write_text(config)


class Group:
    """A control group, removed at the end."""

    def __init__(self, parent: Path, limit: int) -> None:
        self.path = parent / f"headrace-{os.getpid()}"
        self.path.mkdir()
        self._is_first = (self.path / "memory.limit_in_bytes").exists()
        (self.path / ("memory.limit_in_bytes" if self._is_first else "memory.max")).write_text(str(limit))

    @property
    def peak(self) -> int:
        return int((self.path / ("memory.max_usage_in_bytes" if self._is_first else "memory.peak")).read_text())

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        self.path.rmdir()


async def call(port: int, until: float, found: list[str]) -> None:
    head = (
        b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}' % (WIDTH, 4 * WIDTH)
    )
    body = head + np.ones(WIDTH, np.float32).tobytes()
    request = (
        b"POST /v2/models/big/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n" % (len(head), len(body))
    ) + body
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", answer)
            content = await reader.readexactly(int(length[1]) if length else 0)
            values = np.frombuffer(content[-4 * WIDTH :], np.float32)
            if answer[9:12] != b"200":
                found.append(content.decode(errors="replace")[:100])
            else:
                found.append("ok" if np.allclose(values, 1, atol=1e-3) else "wrong")
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        found.append(type(error).__name__)


async def load(port: int, callers: int, seconds: float) -> list[str]:
    found: list[str] = []
    until = time.monotonic() + seconds
    await asyncio.gather(*(call(port, until, found) for _ in range(callers)))
    return found


def run(name: str, arguments: argparse.Namespace) -> bool:
    environ, parameters = SETTINGS[name]
    group = Group(arguments.cgroup, arguments.limit_mib * MIB)
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_model(Path(folder), parameters)
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")  # pages that other groups have read count for these
        words = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", "--http-address=127.0.0.1"]
        command = [sys.executable, "-m", "headrace_cli", "serve", f"--model-repository={folder}", *words]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}, preexec_fn=group.join
        ) as server:
            assert server.stderr is not None
            log = []
            for line in server.stderr:
                log.append(line)
                if "Started HTTPService" in line:
                    break
            found = asyncio.run(load(http, arguments.callers, arguments.seconds)) if server.poll() is None else []
            status = Path(f"/proc/{server.pid}/status").read_text()
            high = re.search(r"VmHWM:\s+(\d+)", status)
            server.terminate()
            log += server.stderr
    peak = group.peak
    group.close()
    is_good = server.returncode == 0 and bool(found) and set(found) == {"ok"}
    failed = {each: found.count(each) for each in {*found} - {"ok"}}
    resident = int(high[1]) // 1024 if high else 0
    print(
        f"{name}: {'ok' if is_good else 'BAD'}, group {peak // MIB} MiB, resident {resident} MiB, "
        f"{found.count('ok') / arguments.seconds:.0f}/s, failed {failed or 'none'}, exit {server.returncode}",
        flush=True,
    )
    if not is_good:
        print("".join(log[-5:]))
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--cgroup", type=Path, default=Path("/sys/fs/cgroup/memory"))
    parser.add_argument("--folder", default=None, help="where the model is written: not in memory")
    arguments = parser.parse_args()
    return int(sum(not run(name, arguments) for name in SETTINGS) > 0)


if __name__ == "__main__":
    sys.exit(main())
