"""The frame of all attacks notices what it is there to notice."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace


def test_a_server_at_peace(attacked: Headrace, under_attack: Callable[..., AbstractContextManager[None]]) -> None:
    with under_attack(attacked):
        pass


def test_a_server_that_stands_still_is_noticed(
    attacked_natively: Headrace,
    under_attack: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One stop of a second is one late answer, and two hundred probes that were due meanwhile."""
    # What a busy hypervisor takes from this machine meanwhile would excuse it.
    monkeypatch.setitem(inspect.unwrap(under_attack).__globals__, "_stolen_ms", lambda: 0.0)

    def stand_still() -> None:
        with under_attack(attacked_natively, 500):
            os.kill(attacked_natively.process.pid, signal.SIGSTOP)
            threading.Event().wait(1.0)
            os.kill(attacked_natively.process.pid, signal.SIGCONT)

    with pytest.raises(AssertionError, match="p99_ms"):
        stand_still()
