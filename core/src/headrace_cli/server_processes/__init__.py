"""Whole servers that share one HTTP port and one gRPC port (``headrace serve --workers``).

Each is a complete server, with models, schedulers and frontends. The kernel assigns each connection to one of them
(SO_REUSEPORT). The process that was started is their supervisor and has no models.

===============  =====================================================================================
supervisor       reserves the ports, starts the servers, replaces those that end, stops them, and serves
                 the metrics page, which is the sum over the servers
server_process   one server, seen from the supervisor
server_program   the program of a server: `headrace_cli.serve`, stopped by the supervisor instead of a signal
model_changes    applies loads and unloads by name to all servers
refusals         lists the options that do not work with several servers
===============  =====================================================================================

A server binds the ports itself when its models are loaded. So no connection waits for a server that is still loading,
and if a server dies, new connections go to the others. The supervisor reserves the ports by sockets that do not listen.
Supervisor and server exchange the command line, the metrics (`metric_sums`), and start, stop and liveness messages
(`headrace_processes.supervision`).
"""
