"""The end of a port with TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.core.headrace_hosts.test_handshakes import closed, connected, hello, serving
from tests.core.headrace_hosts.test_tls_files import pem

__all__ = ["pem"]


def test_the_end_of_a_port_closes_what_is_not_open_yet(pem: Path) -> None:
    async def scenario() -> None:
        async with serving(pem) as server:
            with connected(server.port) as silent, connected(server.port, hello(pem)) as begun:
                assert not await closed(begun)
                server.acceptor.close()
                while not await closed(begun):
                    pass
                assert await closed(silent)

    asyncio.run(asyncio.wait_for(scenario(), 20))
