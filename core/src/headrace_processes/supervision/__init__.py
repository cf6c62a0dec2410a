"""Child processes of the server, of any kind: how they start, exit and are restarted.

In the server, `child_process` starts and kills a process. `exits` detects its exit, describes it for messages, and has
the restart policy. `orphan_reaper` is a process that kills the children if the server dies. In the child, `bootstrap`
runs first. Instances in processes (`headrace_processes`) use these.

A `supervised_process` has one channel to its parent, for its settings and the command to drain. A `heartbeat` detects
a process that no longer answers. A `process_set` keeps a fixed number of processes running. `parent_channel` is the
child's end of the channel. The server processes of ``--workers`` use these.
"""
