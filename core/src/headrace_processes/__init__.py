"""Instances in processes of their own, one child each: launch, handshake, exit, restart.

| Module | Runs in | Does |
|---|---|---|
| `plugin`, `process_kind` | server | register the kind of executor `process`, and create its executors |
| `process_executor` | server, event loop | owns the children of one instance, one after the other |
| `child` | server, event loop | one child process, from launch to end |
| `launch` | server, a thread | starts the process |
| `handshake` | both | says what to load, and checks that it is loaded and ready |
| `batch_channel` | server, event loop | sends batches, receives answers |
| `child_main` | child | executes batches on the main thread, and reads other messages on a second one |
| `remote_services` | both | calls from the instance to its server, and its log |

The messages are in `headrace_processes.ipc`. Exits and restarts are in `headrace_processes.supervision`, with the
bootstrap that runs first in the child.
"""
