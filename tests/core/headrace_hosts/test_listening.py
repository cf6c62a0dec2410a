"""A reserved port is kept for the processes that will share it, and for no other."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from headrace.errors import Unavailable
from headrace_hosts.listening import Listen, listen_grpc, listen_http, reserve_port

HERE = "127.0.0.1"


@pytest.mark.parametrize("listen", [listen_http, listen_grpc])
def test_a_reserved_port_is_listened_on_by_several_and_only_by_those(listen: Listen) -> None:
    with closing(reserve_port(listen, HERE, 0, False)) as reserved:
        port = reserved.getsockname()[1]
        with listen(HERE, port, True, True), listen(HERE, port, True, True), pytest.raises(Unavailable, match="in use"):
            listen(HERE, port, False, True)


@pytest.mark.parametrize("listen", [listen_http, listen_grpc])
def test_a_port_that_another_listens_on_is_reserved_only_to_be_shared(listen: Listen) -> None:
    with listen(HERE, 0, True, True) as other:
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=f"{HERE}:{port}"):
            reserve_port(listen, HERE, port, False)
        reserve_port(listen, HERE, port, True).close()


def test_a_reserved_port_takes_no_connections() -> None:
    with closing(reserve_port(listen_http, HERE, 0, False)) as reserved, pytest.raises(ConnectionRefusedError):
        socket.create_connection(reserved.getsockname(), timeout=30)
