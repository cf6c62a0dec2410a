"""The cause of an engine that does not start, from the processes that log it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace_vllm.start_errors import FILE, collected_errors, note_errors

#: What vLLM 0.32 raises in the server.
FAILED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}")
KILLED = "Linux kills one if memory runs out"
#: A process of vLLM, which logs what it raises.
PROCESS = """
import logging, sys
from headrace_vllm.start_errors import note_errors
logging.getLogger("vllm").propagate = False
logging.lastResort = None
for _ in range(2):
    note_errors()  # vLLM may load a plugin more than once
for text in sys.argv[1:]:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("vllm.v1.worker").exception("WorkerProc failed to start.")
"""
NEED = "Free memory on device cuda:0 (3/80 GiB) is less than desired.\nDecrease GPU memory utilization."
POINTER = "Worker failed with error '...', please check the stack trace above for the root cause"


def log(*texts: str) -> None:
    subprocess.run([sys.executable, "-c", PROCESS, *texts], check=True)


@pytest.mark.parametrize(
    ("logged", "error", "cause"),
    [
        ((NEED, POINTER), FAILED, f"ValueError: {NEED}".replace("\n", "\\n")),
        ((POINTER,), FAILED, f"ValueError: {POINTER}. A process ended without an error: {KILLED}"),
        ((), FAILED, f"{FAILED}. A process ended without an error: {KILLED}"),
        ((), ValueError("max_model_len is 0"), "max_model_len is 0"),
        (("x" * 10**5,), FAILED, "ValueError: " + "x" * 500),
    ],
    ids=["cause", "a worker is killed", "the engine is killed", "an argument", "long"],
)
def test_the_cause_is_the_error_of_the_process_that_failed_first(
    logged: tuple[str, ...], error: Exception, cause: str
) -> None:
    with collected_errors() as errors:
        if logged:
            log(*logged)
        assert errors.cause_of(error) == cause


def test_an_engine_that_has_started_writes_no_more_than_64_kib() -> None:
    with collected_errors() as errors:
        log(*["x" * 1000] * 200)
        assert errors._file.stat().st_size < (1 << 16) + 1000


def test_no_file_is_left_and_vllm_by_itself_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with collected_errors() as errors:
        file = errors._file
        assert file.exists()
    assert not file.exists()
    note_errors()
    monkeypatch.setenv(FILE, str(tmp_path / "none"))
    note_errors()
    assert not any(tmp_path.iterdir())
