"""echo.py hypercorn|uvicorn PORT: a plain ASGI application that sends the body back."""

from __future__ import annotations

import sys
from typing import Any


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(parts)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(server: str, port: int) -> None:
    if server == "uvicorn":
        import uvicorn

        uvicorn.run(app, port=port, log_level="error", http="httptools", loop="uvloop", lifespan="off")
    else:
        import uvloop
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind, config.errorlog = [f"127.0.0.1:{port}"], None
        uvloop.run(serve(app, config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
