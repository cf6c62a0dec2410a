"""The command lines of ``flags.json``, and how it and ``help.json`` are recorded from a real Triton 2.51.

``python -m tests.commands.tritonserver.recorded TRITONSERVER`` runs the program once for each of them, without a model
repository: a command line that is accepted ends with the error about that, and no port is opened.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("flags.json")
HELP = Path(__file__).with_name("help.json")
#: The arguments of each case, with Triton's output.
CASES: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []

BOOLEANS = """
allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker allow-vertex-ai
enable-peer-access exit-on-error grpc-keepalive-permit-without-calls grpc-use-ssl grpc-use-ssl-mutual
log-error log-info log-warning model-namespacing reuse-grpc-port reuse-http-port strict-model-config
strict-readiness
""".split()  # noqa: SIM905
INTEGERS = """
buffer-manager-thread-count exit-timeout-secs grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size grpc-keepalive-time
grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-port http-port
http-thread-count log-verbose metrics-port model-load-retry-count model-load-thread-count
pinned-memory-pool-byte-size repository-poll-secs response-cache-byte-size sagemaker-port
sagemaker-thread-count trace-count trace-log-frequency trace-rate vertex-ai-port vertex-ai-thread-count
""".split()  # noqa: SIM905
TEXTS = """
backend-directory cache-directory grpc-address grpc-header-forward-pattern grpc-root-cert grpc-server-cert
grpc-server-key http-address http-header-forward-pattern id log-file metrics-address model-config-name
repoagent-directory trace-file vertex-ai-default-model
""".split()  # noqa: SIM905
#: The values of all other flags.
OTHERS = {
    "backend-config": ["python,shm=1", "default-max-batch-size=4", "python", "python,x", ",a=b", "=b", "a=", ""],
    "cache-config": ["local,size=1048576", "local,size", "size=1", "local", ",size=1", "local,=1", ""],
    "cuda-memory-pool-byte-size": ["0:1024", "0:-1", "0:x", "0", "x:1", ":", ""],
    "cuda-virtual-address-size": ["0:1024", "0:x", "0", ""],
    "grpc-infer-response-compression-level": ["none", "low", "medium", "high", "HIGH", "best", ""],
    "grpc-restricted-protocol": [
        "health:k=v", "health,metadata:k=v", "nonsense:k=v", "health", "health:k", "health:=v", ":k=v", "health:k=", "",
    ],
    "host-policy": ["gpu_0,numa-node=0", "gpu_0,cpu-cores=0-1", "gpu_0", "numa-node=0", "gpu_0,colour=red", ""],
    "http-restricted-api": [
        "health:k=v", "health,metadata:k=v", "nonsense:k=v", "health", "health:k", "health:=v", ":k=v", "health:k=", "",
    ],
    "log-format": ["default", "ISO8601", "iso8601", "json", ""],
    "metrics-config": ["summary_latencies=true", "a,b=c", "summary_latencies", "=true", "a=", ""],
    "metrics-interval-ms": ["1000", "1000.5", "-1", "x", ""],
    "min-supported-compute-capability": ["6.0", "7", "x", "", "1e400"],
    "model-control-mode": ["none", "poll", "explicit", "POLL", "sometimes", ""],
    "model-load-gpu-limit": ["0:0.5", "0:1.5", "0:-1", "0:x", "0", ""],
    "rate-limit": ["off", "execution_count", "OFF", "some", ""],
    "rate-limit-resource": ["R1:10", "R1:10:0", "R1:x", "R1", ":1", "R1:1:x", "R1:1:0:0", ""],
    "sagemaker-safe-port-range": ["8000-8010", "8010-8000", "8000", "a-b", ""],
    "trace-config": [
        "level=TIMESTAMPS", "level=OFF", "level=LOUD", "rate=x", "rate=100", "count=-1", "count=x", "mode=triton",
        "mode=opentelemetry", "mode=smoke", "triton,file=/nowhere/t.json", "triton,log-frequency=x",
        "opentelemetry,url=localhost:4318", "colour=red", "triton,colour=red", "level", "=x", "a,b,c=d", "",
    ],
    "trace-level": ["OFF", "TIMESTAMPS", "TENSORS", "min", "MAX", "LOUD", ""],
}  # fmt: skip
REPEATED = {
    "backend-config": ("a,b=c", "a,b=d"),
    "cache-config": ("local,size=1048576", "redis,host=x"),
    "cuda-memory-pool-byte-size": ("0:1", "0:2"),
    "grpc-restricted-protocol": ("health:a=b", "health:c=d"),
    "host-policy": ("a,numa-node=0", "b,numa-node=0"),
    "http-restricted-api": ("health:a=b", "health:c=d"),
    "metrics-config": ("a=b", "c=d"),
    "rate-limit-resource": ("R1:1", "R1:2"),
    "trace-config": ("level=TIMESTAMPS", "level=TENSORS"),
    "trace-level": ("TIMESTAMPS", "TENSORS"),
}
#: Whole command lines.
LINES = (
    "", "--help", "-h", "--version", "--", "extra", "--foo", "--foo=1", "-x", "--http", "--http-p=9000", "--log",
    "--id", "--id a b", "--disable-auto-complete-config", "--disable-auto-complete-config=true",
    "--disable-auto-complete-config true", "--load-model=a", "--load-model=a --model-control-mode=explicit",
    "--load-model=* --load-model=a --model-control-mode=explicit", "--load-model= --model-control-mode=explicit",
    "--http-port=9000 --grpc-port=9000", "--http-port=8002", "--metrics-port=8001",
    "--http-port=9000 --grpc-port=9000 --allow-grpc=false",
    "--allow-sagemaker=true --sagemaker-port=8000", "--allow-vertex-ai=true --allow-sagemaker=true",
    "--allow-vertex-ai=true --vertex-ai-port=8000",
    "--allow-sagemaker=true --sagemaker-safe-port-range=9000-9010",
    "--response-cache-byte-size=1 --cache-config=local,size=1",
    "--strict-model-config=false --disable-auto-complete-config", "--help --foo", "--foo --help",
    "--model-repository=", "--model-store=", "--model-repository", "--http-port=x --allow-http=maybe",
    "--allow-http=false --allow-grpc=false --allow-metrics=false",
)  # fmt: skip


def cases() -> Iterator[list[str]]:
    """Yield the words of each case."""
    for line in LINES:
        yield line.split()
    for flag in BOOLEANS:
        yield from _values(flag, ["true", "FALSE", "on", "0", "maybe", "2", ""])
    for flag in INTEGERS:
        yield from _values(flag, ["5", "+5", " 5", "5 ", "5x", "x", "-1", "1.5", "99999999999", "9" * 30, ""])
    for flag in TEXTS:
        yield from _values(flag, ["some", "two words", ""])
    for flag, values in OTHERS.items():
        yield from _values(flag, values)


def _values(flag: str, values: Sequence[str]) -> Iterator[list[str]]:
    good = values[0]
    yield [f"--{flag}", good]
    yield [f"--{flag}"]
    yield [f"--{flag}={word}" for word in REPEATED.get(flag, (good, good))]
    yield from ([f"--{flag}={value}"] for value in values)


@cache
def usage_text(program: str) -> str:
    """Return what follows the first line of the usage."""
    stderr = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=False).stderr
    return stderr.partition("\n")[2].rstrip("\n")


def record(program: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the exit code of the program, and its output before and after its usage."""
    with tempfile.TemporaryDirectory() as folder:
        running = subprocess.Popen(
            [program, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, stderr = running.communicate(timeout=3)
            code: int | None = running.returncode
        except subprocess.TimeoutExpired:  # it serves, without a repository
            running.kill()
            out, stderr = running.communicate()
            code = None
    assert not out, out
    before, usage, after = stderr.partition("Usage: tritonserver [options]\n")
    if usage:
        after = after.removeprefix(usage_text(program))
    relevant = [line for line in (before if usage else stderr).splitlines() if re.match(r"Warning: |/|error: ", line)]
    before = re.sub(r"^/\S*/tritonserver:", "tritonserver:", "\n".join(relevant))
    return {"words": list(words), "code": code, "usage": bool(usage), "before": before,
            "after": after.strip()}  # fmt: skip


if __name__ == "__main__":
    found = [json.dumps(record(sys.argv[1], words)) for words in cases()]
    groups = re.findall(r"^([A-Z][^\n]*):\n((?:[ \t].*\n)+)", usage_text(sys.argv[1]) + "\n", re.MULTILINE)
    named = {title: re.findall(r"^  --(\S+)", text, re.MULTILINE) for title, text in groups}
    HELP.write_text(json.dumps(named, indent=1) + "\n")
    RECORD.write_text("".join(("[\n", ",\n".join(found), "\n]\n")))
