"""Instances in processes of their own, one child each.

In the server, on its event loop: `worker` owns one `child` after the other (`deaths`), which `launching`
starts; `receiving` hears it, `traffic` has what it executes, `questions` and `rehearsal` what is asked of
it before, `desk` what it asks for, `releases` what is no longer looked at, and `vigil` waits for its end,
which `exits` and `obituary` word. `guardian` is a process that outlives the server for a moment.

In the child: `bootstrap` runs first and calls `serving`, which gives the main thread to `executor` and
another to `listening`. `loading` makes the instance that the `order` describes, `sending`, `outbox` and
`line` say what there is to be said, `remote` and `direct` are the services, and `forwarding` the log.

On both sides: messages (`wire`), and memory for what is too large for them (`arena`, `blocks`).
"""
