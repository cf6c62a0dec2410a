"""How two processes of one server speak with each other: requests, answers, and what becomes of both.

It knows neither models nor child processes. A server and the processes of its models use it.

======================  ==========================================================================
`framing`               how messages are told apart on a socket, and what kinds there are
`codec`, `tensors`      requests and answers in a frame; `json_parts` is what travels as JSON
`layouts`               requests and answers that differ in the bytes of their tensors only, many at a time
`batches`               batches of an instance and what became of them, undescribed where they are alike
`replies`               what an answer is on its way, or what is said in its place
`arena`                 shared memory for tensors that are too large for a frame
`channel`               sockets that take and give whole frames, for threads and for an event loop
`peer_requests`         requests from the side that asks, and from the side that is asked
`busy_poll`             how long to look for a message before sleeping
======================  ==========================================================================

Neither side believes the other: everything is checked against the frame and the arena while it is read,
and `framing.ProtocolError` says that the peer is broken. Integers are little-endian; nothing is ever
unpickled.
"""
