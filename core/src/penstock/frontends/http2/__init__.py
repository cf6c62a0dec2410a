"""HTTP/2 as a server speaks it (RFC 9113), on an asyncio transport. Knows nothing of gRPC.

::

    socket ── Connection ── Stream ── whoever made the stream
              frames, settings, pings,   headers, data and trailers out under flow control,
              windows of the connection  data in, window of the stream

`Connection` asks its `Service` for a `Stream` per request; a subclass of `Stream` says what is done
with what arrives. `Limits` bound what a peer may do. Everything runs on the event loop, without a
task, a future, a lock or a log line per frame.
"""
