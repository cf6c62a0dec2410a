"""Triton's environment variables that delay gRPC calls, to test the time-outs of clients.

Source: docs/spec/behaviours.md section 2.6. Without one of the variables, nothing is added to the server.
"""

from __future__ import annotations

from headrace import Extension, hookimpl
from headrace_test_switches.delayed_calls import TestSwitches

__all__ = ["TestSwitches", "register_extensions"]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [TestSwitches]
