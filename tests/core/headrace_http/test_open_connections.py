"""The bytes of many large bodies that one turn of the event loop receives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.off_loop import OffLoopWork
from headrace_http import open_connections
from headrace_http.caller_limits import HttpLimits
from headrace_http.message import Cancel, HttpRequest, Reply
from headrace_http.open_connections import _TURN_BYTES, _TURN_NS, NativeConnections


def test_a_turn_ends_by_its_bytes_or_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000_000_000
    monkeypatch.setattr(open_connections, "monotonic_ns", lambda: now)

    def dispatch(request: HttpRequest, reply: Reply) -> Cancel | None:
        return None

    connections = NativeConnections(dispatch, HttpLimits(), OffLoopWork())
    turns: list[Callable[[], None]] = []
    connections.call_soon = turns.append  # type: ignore[method-assign, assignment]
    connections.spend(_TURN_BYTES // 2)
    assert (connections.turn_bytes, len(turns)) == (_TURN_BYTES // 2, 1)
    connections.spend(_TURN_BYTES // 2)
    assert (connections.turn_bytes, len(turns)) == (0, 1)
    turns.pop()()
    assert connections.turn_bytes == _TURN_BYTES
    # Memory that is new to the process is slow: a few bytes can take as long.
    connections.spend(1)
    now += _TURN_NS
    connections.spend(1)
    assert connections.turn_bytes == _TURN_BYTES - 2
    now += 1
    connections.spend(1)
    assert (connections.turn_bytes, len(turns)) == (0, 1)
    turns.pop()()
    connections.spend(1)
    assert (connections.turn_bytes, len(turns)) == (_TURN_BYTES - 1, 1)
