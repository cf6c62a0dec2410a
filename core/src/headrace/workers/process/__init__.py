"""Instances in processes of their own, one child each: launch, handshake, exit, restart. How the two sides speak
is `headrace.ipc`'s.

In the server, on its event loop: `process_worker` owns one `child` after the other (`exits` has the restart policy),
which `launch` starts and `handshake` has loaded; `batch_channel` has what it executes, `endpoint` what it
asks for, and `exit_watcher` waits for its end, which `exits` words. `orphan_reaper` is a process that
outlives the server for a moment.

In the child: `bootstrap` runs first and calls `child_main`, which gives the main thread to `executor` and
another to the listener. `instance_spec` says what to load and how, `remote_services` are what the server does for
the instance, and the log.
"""
