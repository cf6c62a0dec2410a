"""Prints as records: in processes of their own, so that pytest keeps its streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

BEGIN = """
import os, sys, threading
from headrace.telemetry import log_output
from headrace.telemetry.log_output import set_thread_model, set_process_model
undo = log_output.record_prints()
"""


class Output(NamedTuple):
    out: list[Any]
    err: list[Any]

    @property
    def lines(self) -> list[str]:
        return [record["message"] for record in self.out]


def run(program: str) -> Output:
    """The records that ``program`` writes to its two streams."""
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, check=True)
    return Output(*([json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr)))


def test_each_line_is_a_record_of_its_stream() -> None:
    output = run("print('a', 1); print('b', file=sys.stderr); print('c\\n\\nd')")
    assert output.lines == ["a 1", "c", "", "d"]
    assert [(record["logger"], record["message"]) for record in output.err] == [("stderr", "b")]
    assert {record["logger"] for record in output.out} == {"stdout"}
    assert {record["level"] for record in output.out} == {"INFO"}
    assert {record["thread"] for record in output.out} == {"MainThread"}


def test_text_without_a_newline_waits_for_one_or_for_a_flush() -> None:
    output = run(
        "print('a', end=''); print('b'); print('c', end='', flush=True); print('d'); print('e', end=''); undo()"
    )
    assert output.lines == ["ab", "c", "d", "e"]


def test_a_model_is_named_by_its_thread_or_its_process() -> None:
    output = run("""
def work():
    set_thread_model("digits")
    print("one")
print("before")
thread = threading.Thread(target=work, name="digits_0")
thread.start(); thread.join()
set_process_model("words")
thread = threading.Thread(target=print, args=("two",))
thread.start(); thread.join()
print("three")
""")
    assert [(r["message"], r.get("model")) for r in output.out] == [
        ("before", None),
        ("one", "digits"),
        ("two", "words"),
        ("three", "words"),
    ]
    assert output.out[1]["thread"] == "digits_0"


def test_threads_do_not_mix_their_lines() -> None:
    output = run("""
def work(letter):
    for _ in range(200):
        for part in letter * 20:
            print(part, end="")
        print()
threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    assert sorted(output.lines) == sorted(letter * 20 for letter in "abcd" for _ in range(200))


def test_bytes_and_other_ways_to_write_are_records_too() -> None:
    output = run("""
sys.stdout.buffer.write(b"raw \\xff\\n")
sys.stdout.writelines(["x\\n", "y\\n"])
print("\\x1b[31mred\\r")
print("\\ud800")
""")
    assert output.lines == ["raw \\xff", "x", "y", "\x1b[31mred", "\\ud800"]


def test_a_line_without_an_end_is_cut() -> None:
    output = run("print('x' * 100_000)")
    assert "".join(output.lines) == "x" * 100_000
    assert max(map(len, output.lines)) <= 16 * 1024


@pytest.mark.parametrize("program", ["print('x')", "print('x', file=sys.stderr)", "print('x', end=''); undo()"])
def test_printing_works_without_a_reader(program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + program + "; undo()"], stdout=writer, stderr=writer, check=False
    )
    os.close(writer)
    assert ran.returncode == 0


def test_the_streams_are_put_back() -> None:
    output = run(
        "assert log_output.prints_are_records(); undo(); "
        "assert not log_output.prints_are_records(); print('{\"plain\": 1}')"
    )
    assert output.out == [{"plain": 1}]


def test_a_stream_without_a_descriptor_stays() -> None:
    output = run(
        "undo(); import io; sys.stdout = mine = io.StringIO(); log_output.record_prints(); assert sys.stdout is mine"
    )
    assert output == ([], [])
