"""Tensors outside of their messages, such as in shared memory: what HTTP and gRPC share of them.

Core proper imports nothing of it. `headrace` exports `TensorLocation` for extensions.
"""
