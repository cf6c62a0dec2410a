"""The messages between the server and a child: a fixed binary schema, version `frames.VERSION`.

A message is a frame::

    header   total u32 (a multiple of 8, header included) | kind u8 | spare u8 | number u16 | data u32
    meta     what the kind says, `number` times
    data     tensors that travel inside, each at a multiple of 8 bytes; begins at `data`

`codec` writes and reads whole messages; `requests`, `answers`, `tensors` and `updates` have what stands in them,
`settings` and `notes` what travels as JSON. Neither side believes the other: everything is checked
against the frame and the arena while it is read, and `failure.WireError` says that the peer is broken.
Integers are little-endian; nothing is ever unpickled.
"""
