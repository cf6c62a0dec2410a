"""Instances in processes of their own, one child each: launch, handshake, exit, restart. How the two sides speak
is `headrace.ipc`'s.

In the server, on its event loop: `process_executor` owns one `child` after the other, which `launch` starts and
`handshake` has loaded; `batch_channel` has what it executes. What becomes of its end is `headrace.supervision`'s.

In the child: the bootstrap runs first and calls `child_main`, whose main thread executes and another listens.
`handshake` says what to load and how. `remote_services` are what the server does for the instance, and its log: one
half of it runs in the child, the other in the server.
"""
