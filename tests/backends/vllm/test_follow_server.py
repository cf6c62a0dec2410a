"""A process of the engine ends with its server, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace_vllm.follow_server import SERVER, follow_server

CHILD = """
import os, time
from headrace_vllm.follow_server import follow_server
follow_server()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
os.environ["{server}"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_an_engine_ends_with_a_server_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT.format(server=SERVER), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
        assert parent.stdout.read() == b""  # at the end, nobody holds the pipe


def test_vllm_without_a_server_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER, raising=False)
    follow_server()
    monkeypatch.setenv(SERVER, str(os.getpid()))
    follow_server()
