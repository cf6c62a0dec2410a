"""One broken WebSocket for each check of them, which has to catch it, on the host that has WebSockets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_testing import socket_client
from tests.testing.test_extension_saboteurs import ADDS, CHECKS, ECHO, SOCKET, SOCKETS, Sound, install, run

__all__ = ["install"]


class SoundSocket(Sound):
    def options(self) -> dict[str, Any]:
        return {"http_server": "hypercorn"}


@pytest.mark.parametrize("name", [name for name in CHECKS if "socket" in name])
def test_a_sound_socket_passes(install: Callable[..., None], name: str, tmp_path: Path) -> None:
    install(ADDS, SOCKET.format(ECHO))
    run(name, tmp_path, SoundSocket)


@pytest.mark.parametrize("saboteur", SOCKETS)
def test_a_broken_socket_is_caught(
    install: Callable[..., None], saboteur: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_client, "_END_S", 0.5)
    words, route = SOCKETS[saboteur]
    (check,) = [name for name in CHECKS if words in name]
    install(ADDS, SOCKET.format(route))
    with pytest.raises(AssertionError):
        run(check, tmp_path, SoundSocket)
