"""Whole servers that share one HTTP port and one gRPC port (``headrace serve --workers``).

Each has all of a server: models, schedulers, frontends. The system hands each connection to one of them (SO_REUSEPORT).
The process that was started has no model: it is their supervisor.

===============  =====================================================================================
supervisor       claims the ports, starts the servers, replaces those that end, stops them in order, and
                 answers the metrics page, which is the sum of theirs
server_process   one server, as the supervisor has it
server_program   what runs in it: `headrace.cli.serve`, told to stop by the supervisor and not by a signal
model_changes    loads and unloads by name, which all servers make
refusals         what servers that do not know each other cannot do
===============  =====================================================================================

A server binds the ports itself, once its models are loaded: so no connection waits for one that is still loading, and
those that come when one has died go to the others. Meanwhile the supervisor keeps the ports, by sockets that do not
listen. Between the two travel the command line, what is measured (`headrace.telemetry.metric_sums`), and the life of
the process (`headrace.supervision`).
"""
