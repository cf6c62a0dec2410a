"""Code of plugins that raises what is no `Exception`, on the hosts of plugins."""

from __future__ import annotations

import pytest

from tests.core.conftest import gated, make_server, repository, write_model
from tests.core.test_plugin_exits import *  # noqa: F403

__all__ = ["gated", "make_server", "repository", "write_model"]


@pytest.fixture  # type: ignore[no-redef]
def hosts() -> tuple[str, str]:
    return "hypercorn", "grpcio"
