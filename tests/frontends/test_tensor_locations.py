"""Tensors beside the message on the hosts of plugins."""

from __future__ import annotations

import pytest

from tests.core.conftest import gated, make_server, repository, write_model
from tests.core.headrace_locations.test_tensor_locations import *  # noqa: F403

__all__ = ["gated", "make_server", "repository", "write_model"]


@pytest.fixture  # type: ignore[no-redef]
def hosts() -> tuple[str, str]:
    return "hypercorn", "grpcio"
