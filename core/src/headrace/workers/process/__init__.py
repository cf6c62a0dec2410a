"""Instances in processes of their own, one child each: launch, handshake, exit, restart. How the two sides speak
is `headrace.ipc`'s.

In the server, on its event loop: `process_worker` owns one `child` after the other, which `launch` starts and
`handshake` has loaded; `batch_channel` has what it executes. `exits` has what becomes of its end: who notices it, the
words for it, and the restart policy. `orphan_reaper` is a process that outlives the server for a moment.

In the child: `bootstrap` runs first and calls `child_main`, whose main thread executes and another listens.
`handshake` says what to load and how. `remote_services` are what the server does for the instance, and its log: one
half of it runs in the child, the other in the server.
"""
