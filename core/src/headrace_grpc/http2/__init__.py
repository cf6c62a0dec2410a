"""The server side of HTTP/2 (RFC 9113) on an asyncio transport. It has no code for gRPC.

::

    socket ── Connection ── Receiver ── Stream ── Sender ── socket
              streams,      frames,     one       windows, one write
              open, close   headers     request   per loop turn

`Connection` asks its `Service` for one `Stream` per request. A subclass of `Stream` handles the bytes that arrive.
`Limits` bound what a peer may do; an `Allowance` counts its faults. A `Lifetime` decides when a connection ends,
in a periodic sweep over all `Connections`.
Everything runs on the event loop, without a task, a future, a lock or a log line per frame.
"""
