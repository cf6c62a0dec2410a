"""A flag that several servers on one port cannot obey is refused before anything starts."""

from __future__ import annotations

import os

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError
from headrace_cli.command_line import read_options
from headrace_cli.server_processes.refusals import warning

WORDS = ["--model-repository=/r", "--workers=2"]


def read(*words: str) -> ServerOptions:
    return read_options([*WORDS, *words], {})[0]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--dev", " together with --dev: "),
        ("--rate-limit=execution_count", " together with --rate-limit=execution_count: each worker has a rate limiter"),
        (
            "--metrics-config=summary_latencies=true",
            " together with --metrics-config=summary_latencies=true: quantiles of several workers",
        ),
        ("--allow-http=false --allow-grpc=false", ": there is no port to share"),
    ],
)
def test_it_is_refused_by_name_and_reason(words: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words.split())
    assert caught.value.message.startswith(f"--workers=2 is refused{what}")


@pytest.mark.parametrize(
    "words", ["--model-control-mode=poll", "--grpc-server=grpcio", "--http-server=hypercorn", "--allow-grpc=false"]
)
def test_everything_else_is_taken(words: str) -> None:
    assert read(words).workers == 2


def test_one_worker_has_all_requests_and_so_all_of_a_resource() -> None:
    assert read_options([*WORDS, "--workers=1", "--rate-limit=execution_count"], {})[0].workers == 1


def test_auto_is_one_per_core() -> None:
    assert read("--workers=auto").workers == len(os.sched_getaffinity(0))


def test_separate_parts_of_each_worker_are_one_line() -> None:
    assert "response cache" not in warning(read())
    line = warning(read("--cache-config=local,size=1000"))
    assert line.startswith("--workers=2: each of 2 servers has models, dynamic batches, ")
    assert " and response cache of its own" in line
    assert "\n" not in line
