"""Reads streams of server-sent events at once, and counts the events."""

from __future__ import annotations

import asyncio
import json
from typing import Any


async def read_events(
    port: int, path: str, document: Any, connections: int, rounds: int, word: bytes = b"data:"
) -> int:
    """POST ``document`` as JSON to ``path`` ``rounds`` times over each of ``connections`` at once.

    Return the number of ``word`` in the answers. By default, that is the number of events.
    """
    body, size = json.dumps(document).encode(), len(word) - 1
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 0
        for _ in range(rounds):
            writer.write(head + body)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(65536)
                if not data:
                    raise RuntimeError("the server closed the connection")
                count += (tail[-size:] + data).count(word)
                tail = (tail + data)[-max(size, 5) :]
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(connections))))
