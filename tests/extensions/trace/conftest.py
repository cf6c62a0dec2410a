"""A server that traces to a file, with one model without a process, or with the models of the recorded Triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.extensions.trace.recorded import write_adds, write_repository

if TYPE_CHECKING:
    from tests.conftest import Headrace


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with ``adds`` alone, of the backend ``identity``: it is traced as any model is."""
    return write_adds(tmp_path / "models")


@pytest.fixture
def all_models(tmp_path: Path) -> Path:
    """A repository with the models of the recorded Triton, each of which takes a process."""
    write_repository(tmp_path / "all_models")
    return tmp_path / "all_models"


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def start(serve: Callable[..., Headrace], models: Path, trace_file: Path) -> Callable[..., Headrace]:
    """Start a server with further ``--trace-config`` settings."""

    def run(*settings: str, models: Path = models) -> Headrace:
        words = [f"--trace-config={setting}" for setting in (f"triton,file={trace_file}", *settings)]
        return serve(f"--model-repository={models}", *words)

    return run
