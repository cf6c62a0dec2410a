"""Fixtures that run the tests of core on this host."""

from __future__ import annotations

import pytest

from headrace_hypercorn import HypercornFrontend
from tests.core.conftest import loop_guard
from tests.core.headrace_http.conftest import make_caller

__all__ = ["loop_guard", "make_caller"]


@pytest.fixture(scope="session")
def host() -> type[HypercornFrontend]:
    return HypercornFrontend
