"""A program with one job, for the tests of `BoundedProcess`."""

from __future__ import annotations

import os

from headrace_llm import serve_job

#: As the threads of an engine that is imported: it is none of the memory of jobs.
BALLAST = bytes(32 << 20)


def shout(given: bytes) -> bytes:
    """Return ``given`` in capitals. ``loop``, ``allocate`` and ``exit`` do harm instead."""
    while given == b"loop":
        pass
    if given == b"allocate":
        return str(len(bytes(1 << 30))).encode()
    if given == b"exit":
        os._exit(3)
    return str(os.getpid()).encode() if given == b"pid" else given.upper()


if __name__ == "__main__":
    serve_job(shout)
