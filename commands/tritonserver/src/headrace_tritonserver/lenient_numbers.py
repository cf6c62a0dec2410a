"""Numbers on a command line that Triton accepts and ``headrace serve`` refuses: ``30s``, ``1.5`` and some ``-1``.

Triton reads an integer by ``std::stoi`` and drops the rest of the text. Asked of Triton 2.51; the test has the record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Triton's flags with an integer, in which it drops a rest.
_INTEGERS = frozenset(
    """
    buffer-manager-thread-count exit-timeout-secs grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size grpc-keepalive-time
    grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-port http-port http-thread-count
    log-verbose metrics-port model-load-retry-count model-load-thread-count pinned-memory-pool-byte-size
    repository-poll-secs response-cache-byte-size sagemaker-port sagemaker-thread-count trace-count
    trace-log-frequency trace-rate vertex-ai-port vertex-ai-thread-count
    """.split()  # noqa: SIM905
)
#: Flags in which Triton accepts a negative number, and what Headrace has for it: no limit, or nothing to do.
_NEGATIVE = dict.fromkeys(
    (
        "buffer-manager-thread-count",
        "grpc-max-connection-age",
        "grpc-max-connection-age-grace",
        "pinned-memory-pool-byte-size",
    ),
    "0",
)
_NUMBER = re.compile(r"\s*([+-]?\d+)(.*)", re.DOTALL)


def read_leniently(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``words`` with each number as Triton reads it, and a warning for each one that was changed."""
    changed, warnings, flag = list[str](), list[str](), ""
    for word in words:
        name, sign, value = (flag, "", word) if flag else word.removeprefix("--").partition("=")
        flag = "" if flag or sign or not word.startswith("--") or name not in _INTEGERS else name
        if name not in _INTEGERS or flag:
            changed.append(word)
            continue
        number = _number(name, value)
        changed.append(f"--{name}={number}" if sign else number)
        if number != value:
            warnings.append(f"Warning: '--{name}={value}' is read as {number}.")
    return changed, warnings


def _number(name: str, value: str) -> str:
    found = _NUMBER.fullmatch(value)
    if found is None:
        return value
    number, rest = found.groups()
    if number.startswith("-") and name in _NEGATIVE:
        return _NEGATIVE[name]
    return number if rest.strip() else value
