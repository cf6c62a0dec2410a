"""The protocol between two processes of one server: requests, answers and cancellations.

The package depends neither on models nor on how processes are started. A server and the processes of its models use
it.

======================  ==========================================================================
`framing`               the frame around each message, and the kinds of messages
`codec`, `tensors`      requests, answers and tensors in binary form; `json_parts` has the rare parts, which are JSON
`layouts`               many requests, or answers, that differ only in ids and tensor bytes, in one message
`batches`               batches for an instance, and their answers: by layout where possible, else by `codec`
`replies`               the forms of an answer, and the errors sent for an answer that cannot be encoded
`arena`                 shared memory for tensors that are too large for a frame
`mappings`              shared memory of clients that a model process maps, too: `shared_mapping`, `bus_errors`
`channel`               sockets that send and receive whole frames, for threads and for an event loop
`peer_requests`         requests in flight, on the side that sends them and on the side that serves them
`busy_poll`             how long to poll for a message before sleeping
======================  ==========================================================================

Neither side trusts the other: everything that is received is checked against the bounds of the frame and of the arena.
`framing.ProtocolError` means that the peer is broken. Integers are little-endian. Nothing is ever unpickled.
"""
