"""Headrace's pytest plugin: fixtures, and a summary of the skipped checks.

Every pytest run loads it where it is installed, so it imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

#: The prefix of the reason of every skip in the conformance kit.
NOT_RUN = "conformance: "


@pytest.fixture
def headrace_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty model repository."""
    return tmp_path_factory.mktemp("repository")


@pytest.fixture
def write_model(headrace_repository: Path) -> Callable[..., Path]:
    """Return a function that adds a model to the repository: ``write_model(config, files=None, name="", version=1)``.

    ``config`` is the text of a ``config.pbtxt`` or a ``ModelConfig``. ``files`` is a directory that becomes the
    version's. The function returns the model's directory.
    """
    from headrace_testing.example import write_model

    def write(config: Any, files: Path | None = None, name: str = "", version: int = 1) -> Path:
        return write_model(headrace_repository, config, files, name, version)

    return write


@pytest.fixture
def headrace_server(headrace_repository: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a server over the repository: ``headrace_server(**options)``.

    It runs in this process, on free ports, and stops at the end of the test. ``options`` are fields of
    `headrace.ServerOptions`.
    """
    from headrace_testing.serving import serve

    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serve(headrace_repository, listen=True, **options))


@pytest.fixture
def infer() -> Callable[..., Any]:
    """Return a function that returns outputs by name: ``infer(server, model, inputs, over="python")``.

    ``over`` is ``python``, ``http-json``, ``http-binary`` or ``grpc``. The last three use the stock ``tritonclient``,
    and skip the test if it is not installed.
    """
    from headrace_testing.serving import infer

    return infer


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the reason of each skipped conformance check, once per reason."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NOT_RUN in reason:
            reasons[reason.partition(NOT_RUN)[2]] = reasons.get(reason.partition(NOT_RUN)[2], 0) + 1
    if reasons:
        terminalreporter.section("conformance checks not run")
        for reason, count in reasons.items():
            terminalreporter.line(f"{reason}{f' ({count} checks)' if count > 1 else ''}")
