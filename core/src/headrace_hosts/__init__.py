"""What the hosts of HTTP and gRPC share: listening, accepting, TLS, memory that clients make them hold, decompression.

Core proper imports nothing of it. `headrace` exports `FileChanges`, and `TlsFiles` for hosts of plugins.
"""
