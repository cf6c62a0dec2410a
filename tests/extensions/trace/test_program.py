"""Tracing in a program with an embedded server without ports. And a file that the system truncates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from headrace import Server, ServerOptions
from headrace.config.option_parts import TraceSetting
from tests.extensions.trace.collector import collecting

CONFIG = """backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
#: Writes records until the limit on the size of a file is reached, raises the limit, and writes one more.
LIMITED = """
import resource, signal, sys
from headrace_trace.trace_file import _File

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
file, failed = _File(sys.argv[1]), 0
for number in range(20):
    try:
        file.write('{"id":%d,"text":"%s"}' % (number, "x" * 700))
    except OSError:
        failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write('{"id":20}')
file.close()
print(failed)
"""


def serve(root: Path, *settings: TraceSetting) -> Server:
    (root / "models/echo/1").mkdir(parents=True)
    (root / "models/echo/config.pbtxt").write_text(CONFIG)
    return Server(ServerOptions(model_repository=(str(root / "models"),), trace_config=settings))


def test_a_program_without_ports_writes_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    settings = [TraceSetting("triton", "file", str(path)), TraceSetting("", "level", "TIMESTAMPS")]
    with serve(tmp_path, *settings, TraceSetting("", "rate", "2")) as server:
        for number in range(4):
            server.infer("echo", {"x": np.full(1, number, np.float32)})
    records = json.loads(path.read_text())
    assert [record["model_name"] for record in records if "model_name" in record] == ["echo", "echo"]


def test_two_servers_of_one_program_have_separate_traces(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/trace.json"
    level, rate = TraceSetting("", "level", "TIMESTAMPS"), TraceSetting("", "rate", "1")
    with collecting() as collector:
        spans = [TraceSetting("", "mode", "opentelemetry"), TraceSetting("opentelemetry", "url", collector.url)]
        with (
            serve(tmp_path / "a", TraceSetting("triton", "file", str(path)), level, rate) as to_file,
            serve(tmp_path / "b", *spans, level, rate) as to_collector,
        ):
            to_file.infer("echo", {"x": np.zeros(1, np.float32)})
            for _ in range(2):
                to_collector.infer("echo", {"x": np.zeros(1, np.float32)})
        assert sum("model_name" in record for record in json.loads(path.read_text())) == 1
        assert sum(span.name == "echo" for span in collector.spans) == 2
        assert sum(span.name == "compute" for span in collector.spans) == 2


def test_a_truncated_record_is_dropped(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "trace.json")]
    failed = int(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
    found = [record["id"] for record in json.loads((tmp_path / "trace.json").read_text())]
    assert 0 < failed < 19
    assert found == [*range(20 - failed), 20]
