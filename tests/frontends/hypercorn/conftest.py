"""Fixtures that run the tests of core on this host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace_hypercorn import HypercornFrontend, HypercornOptions
from tests.core.conftest import loop_guard
from tests.core.headrace_http.conftest import make_caller as make_plain_caller

__all__ = ["loop_guard", "make_plain_caller"]


@pytest.fixture(scope="session")
def host() -> type[HypercornFrontend]:
    return HypercornFrontend


@pytest.fixture(scope="session")
def make_caller(make_plain_caller: Callable[..., Any]) -> Callable[..., Any]:
    return partial(make_plain_caller, plugin_options=[HypercornOptions()])
