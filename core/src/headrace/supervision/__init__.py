"""Processes of the server's own, whatever they do: how they are started, and what becomes of their end.

In the server, `child_process` starts one and ends it, `exits` has who notices its end, the words for it, and the
restart policy; `orphan_reaper` is a process that outlives the server for a moment. In the child, `bootstrap` runs
first. Instances in processes (`headrace.workers.process`) are supervised by it.

Processes that serve beside each other have more in common: a `supervised_process` has one channel to its parent, is
told its settings, starts, drains and ends, and a `heartbeat` finds out whether it has stopped answering; a
`process_set` keeps so many running. `parent_line` is the process's end.
"""
