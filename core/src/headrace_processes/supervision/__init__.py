"""Child processes of the server, whatever they do: how they start, exit and are restarted.

In the server, `child_process` starts and kills a process. `exits` detects its exit, describes it for messages, and has
the restart policy. `orphan_reaper` is a process that kills the children if the server dies. In the child, `bootstrap`
runs first. Instances in processes (`headrace_processes`) use these.

A `supervised_process` adds one channel to its parent, over which it receives its settings and is drained. A `heartbeat`
detects that it has stopped answering, and a `process_set` keeps a fixed number of them running. `parent_channel` is
the child's end of that channel. The server processes of ``--workers`` use these.
"""
