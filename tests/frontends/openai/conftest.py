"""A server with language models for the stock client of OpenAI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from tests.frontends.openai.model_files import write_models
from tests.frontends.openai.task_models import write_task_models

if TYPE_CHECKING:
    from tests.conftest import Headrace


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_models(write_models(tmp_path_factory.mktemp("openai")))


@pytest.fixture(scope="session")
def server(keep_serving: Callable[..., Headrace], models: Path) -> Headrace:
    return keep_serving(f"--model-repository={models}", "--openai-port=0")


@pytest.fixture(scope="session")
def client(server: Headrace) -> Iterator[openai.OpenAI]:
    """The stock client. It sends nothing twice, so that a test sees each error."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def web(server: Headrace) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http}/v1", timeout=60) as web:
        yield web
