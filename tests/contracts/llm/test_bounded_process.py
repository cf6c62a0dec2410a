"""A process with one job: what takes too much ends it, and nothing else."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

import pytest

from headrace import BackendError
from headrace_llm import BoundedProcess

#: Less than `BALLAST`, which the program has before its first job.
LIMIT_BYTES = 24 << 20


@pytest.fixture(scope="module")
def shouting() -> Iterator[BoundedProcess]:
    process = BoundedProcess("tests.contracts.llm.shout", LIMIT_BYTES)
    yield process
    process.close()


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def pid_of(process: BoundedProcess) -> int:
    answer = process.ask(b"pid", 5)
    assert answer is not None
    return int(answer)


@pytest.mark.parametrize("given", [b"", b"a\nb\r\n\0\xff", b"x" * 3_000_000])
def test_any_bytes_are_answered(shouting: BoundedProcess, given: bytes) -> None:
    assert shouting.ask(given, 5) == given.upper()


@pytest.mark.parametrize("given", [b"loop", b"allocate", b"exit"])
def test_what_takes_too_much_ends_the_process_and_the_next_starts_it(shouting: BoundedProcess, given: bytes) -> None:
    pid, began_s = pid_of(shouting), monotonic()
    assert shouting.ask(given, 1.0) is None
    assert monotonic() - began_s < 2
    assert not is_running(pid)
    assert shouting.ask(b"hello", 5) == b"HELLO"


def test_the_process_ends_with_its_last_reference() -> None:
    process = BoundedProcess("tests.contracts.llm.shout", LIMIT_BYTES)
    pid = pid_of(process)
    del process
    assert not is_running(pid)


def test_a_server_with_many_connections_reads_the_answer() -> None:
    """`select.select` refuses descriptors above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    process = BoundedProcess("tests.contracts.llm.shout", LIMIT_BYTES)
    try:
        assert process.ask(b"hello", 5) == b"HELLO"
    finally:
        process.close()
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_that_cannot_start_is_named() -> None:
    with pytest.raises(BackendError, match=r"the process '.*no_such_program .*' cannot start"):
        BoundedProcess("no_such_program", LIMIT_BYTES).ask(b"", 5)
