"""What HTTP and gRPC share: listening, accepting, TLS, memory that clients make them hold, decompression, and the one
response of a request, with its classes.

Core proper imports nothing of it. `headrace` exports `FileChanges`, and `TlsFiles` for hosts of plugins.
"""
