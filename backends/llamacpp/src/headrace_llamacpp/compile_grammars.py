"""The program of `headrace_llamacpp.checker_process`: compiles the grammar of each line, and prints what is wrong.

Both are in hexadecimal digits. The one argument is the memory that the process may allocate, in bytes.
"""

from __future__ import annotations

import resource
import sys


def main() -> None:
    """Answer each line of the standard input until it ends."""
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer("byte")
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _print("")
    for line in sys.stdin.buffer:
        grammar = bytes.fromhex(line.decode()).decode()
        try:
            matcher = LLMatcher(tokens, grammar, log_level=0)
            reason = matcher.get_error()
            if not reason:
                matcher.compute_bitmask()
                reason = matcher.get_error()
        except BaseException as error:  # a panic of Rust is none of `Exception`
            reason = f"{type(error).__name__}: {error}"
        _print(reason)


def _print(text: str) -> None:
    first = " ".join(text.split())[:400]
    sys.stdout.buffer.write(first.encode("utf-8", "replace").hex().encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
