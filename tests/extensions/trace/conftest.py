"""A server that traces to a file, with the models of the recorded Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.extensions.trace.recorded import write_repository

if TYPE_CHECKING:
    from tests.conftest import Headrace


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_repository(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def start(serve: Callable[..., Headrace], models: Path, trace_file: Path) -> Callable[..., Headrace]:
    """Start a server with further ``--trace-config`` settings."""

    def run(*settings: str) -> Headrace:
        words = [f"--trace-config={setting}" for setting in (f"triton,file={trace_file}", *settings)]
        return serve(f"--model-repository={models}", *words)

    return run
