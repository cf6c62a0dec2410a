"""HTTP and gRPC in processes of their own, in front of the one that has the models (``--frontend-processes``).

All listen on the same ports; the system hands each connection to one of them. What a process does for its connections
is what the server would do: the same hosts, the same decoding and encoding. Between the two travel:

==============  ======================================================================================
inferences      decoded, many in a message, by `headrace.ipc`; `headrace.remote_engine` is the end here
everything else whole, as it was received: health, metadata, control, routes of plugins, and requests for a
                model that the process does not know. The engine's process answers by its own tables
models          what is served, whenever that changes
==============  ======================================================================================

In the engine's process, `frontend` binds the ports and keeps the processes running; `process` is one of them, from its
launch to its end; `whole_calls` answers what travels whole. In the frontend's, `headrace.cli.frontend_process` is the
program, and `forwarding` sends what is not answered there. `schema` is what both have agreed on.

The sockets that listen belong to the engine's process: a connection that comes while a process is being replaced waits
for the next one, and only those that the process had accepted are lost with it.
"""
