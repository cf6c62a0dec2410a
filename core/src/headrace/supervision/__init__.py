"""Processes of the server's own, whatever they do: how they are started, and what becomes of their end.

In the server, `child_process` starts one and ends it, `exits` has who notices its end, the words for it, and the
restart policy; `orphan_reaper` is a process that outlives the server for a moment. In the child, `bootstrap` runs
first. Instances in processes (`headrace.workers.process`) are supervised by it.
"""
