"""Each command line of ``flags.json`` is accepted, or refused, as Triton 2.51 did, with its text and its usage."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace_tritonserver import TritonServer
from headrace_tritonserver.grouped_help import GROUPS, OTHERS
from tests.commands.tritonserver.recorded import CASES, HELP

#: The last line for a command line that is accepted: no case has a model repository.
ACCEPTED = "error: creating server: Invalid argument - --model-repository must be specified"
USAGE = "Usage: tritonserver [options]\n"

#: What Triton accepts, and Headrace refuses: negative ports, of which Triton opens others or none; a cache and memory
#: of a negative size; a resource without a name; and a second cache, which Triton refuses when it creates the server.
REFUSED = re.compile(r"=(:1|0:-1)$|-port=-1$|^--response-cache-byte-size=-1$|^--cache-config=redis")
#: Flags that are accepted with a warning of Headrace.
CHANGED = re.compile(r"=(5x|1\.5)$|-(age|age-grace|pool-byte-size|buffer-manager-thread-count)=-1$")
#: Flags that Triton does not have.
MORE = "--log-format=json"
#: Errors that do not show the value of a restriction, which is a secret.
SECRET = re.compile(r"^--(http-restricted-api|grpc-restricted-protocol)=.*:")
#: Errors that Triton finds when it creates the server, without its usage.
LATER = ("--host-policy=gpu_0,colour=red", "--model-load-gpu-limit=0:1.5", "--model-load-gpu-limit=0:-1")
#: Flags that other distributions check, and command lines with a repository.
ELSEWHERE = re.compile(r"^--(trace-|model-repository=|model-store=)")


def is_compared(case: dict[str, Any]) -> bool:
    """True for a command line that Triton judges before it serves, by what is tested here."""
    return case["code"] is not None and not any(map(ELSEWHERE.match, case["words"]))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and stderr of a command line."""
    program = TritonServer()
    code = program.run(program.parse(words))
    out, err = capsys.readouterr()
    assert not out
    return code, err


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIP_MODE", "AIP_STORAGE_URI", "AIP_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", [*filter(is_compared, CASES)], ids=lambda case: " ".join(case["words"]) or "nothing")
def test_a_command_line_is_accepted_or_refused_as_by_triton(
    case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    last = case["words"][-1] if case["words"] else ""
    code, err = run(case["words"], capsys)
    assert code == case["code"] == 1
    before, usage, after = err.partition(USAGE)
    accepted = ACCEPTED in case["before"]
    if REFUSED.search(last) or last in LATER:
        assert accepted or last in LATER
        assert usage
        assert "\nBad option: " in after
    elif last == MORE:
        assert (accepted, err) == (False, ACCEPTED + "\n")
    elif CHANGED.search(last) and accepted:
        assert re.fullmatch(rf"Warning: '{re.escape(last)}' is read as \d.*\n{re.escape(ACCEPTED)}\n", err, re.DOTALL)
    elif accepted:
        assert err == ACCEPTED + "\n"
    else:
        assert usage
        assert SECRET.search(last) or case["after"] in after
        assert "--help" in case["words"] or getopt(case["before"]) == getopt(before)


def getopt(text: str) -> str:
    """Return the error without Headrace's additions: its own flags and the nearest flag."""
    line = next((line for line in text.splitlines() if line.startswith("tritonserver: ")), "")
    short = re.sub(r"invalid option -- '(.)'", r"unrecognized option '-\1'", line)  # Headrace has no short flags but -h
    return re.sub(r"=1'$|'$|'?; (possibilities: |did you mean ).*", "", "" if "'-h'" in short else short)


def test_the_usage_has_all_flags_in_tritons_groups_and_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run(["--help"], capsys)
    assert code == 1
    assert err.startswith(USAGE)
    groups = re.findall(r"^([A-Z][^\n]*):\n((?:[ \t].*\n)+)", err + "\n", re.MULTILINE)
    named = {title: re.findall(r"^  --(\S+)", text, re.MULTILINE) for title, text in groups}
    triton = json.loads(HELP.read_text())
    assert [title for title in named if title != OTHERS] == list(triton)
    for title, names in triton.items():
        newer = {"http-max-input-size", "grpc-infer-thread-count", "grpc-max-response-pool-size", "allow-client-shm"}
        assert [name for name in named[title] if name not in newer] == names
    assert {flag.name for flag in TritonServer.flags()} <= {name for names in named.values() for name in names}
    assert "listen-while-loading" in named[OTHERS]
    assert not {name for name in named[OTHERS] for group in GROUPS.values() if name in group.split()}


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--exit-timeout-secs=30s", "30"),
        ("--exit-timeout-secs 30s", "30"),
        ("--repository-poll-secs=1.5", "1"),
        ("--grpc-max-connection-age=-1", "0"),
        ("--http-thread-count=-3.7", "-3"),
    ],
)
def test_a_number_is_read_as_triton_reads_it(words: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed = TritonServer().parse(words.split()).words
    assert changed[-1].rpartition("=")[2] == number
    assert capsys.readouterr().err.endswith(f" is read as {number}.\n")


@pytest.mark.parametrize("words", ["--http-port=x", "--http-port=", "--http-port", "--id=5x", "--id --http-port", "5x"])
def test_nothing_else_is_changed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert TritonServer().parse(words.split()).words[-len(words.split()) :] == words.split()
    assert not capsys.readouterr().err
