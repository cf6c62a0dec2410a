"""HTTP/2 as a server speaks it (RFC 9113), on an asyncio transport. Knows nothing of gRPC.

::

    socket ── Connection ── Receiver ── Stream ── Sender ── socket
              streams,      frames,     one       windows, what leaves
              begin, end    headers     request   in one write

`Connection` asks its `Service` for a `Stream` per request; a subclass of `Stream` says what is done
with what arrives. `Connections` have a sweep in common, and `Limits` that bound what a peer may do: an `Allowance`
counts what it has done, and a `Lifetime` says when the connection ends.
Everything runs on the event loop, without a task, a future, a lock or a log line per frame.
"""
