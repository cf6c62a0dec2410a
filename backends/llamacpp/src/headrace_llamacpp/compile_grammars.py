"""The program of `headrace_llamacpp.checker_process`: compiles a grammar, and answers with the error."""

from __future__ import annotations

import os

from headrace_llm import serve_job


def main() -> None:
    """Answer each grammar of the standard input until it ends."""
    os.environ["RUST_BACKTRACE"] = "0"
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer("byte")

    def answer(grammar: bytes) -> bytes:
        try:
            matcher = LLMatcher(tokens, grammar.decode(), log_level=0)
            reason = matcher.get_error()
            if not reason:
                matcher.compute_bitmask()
                reason = matcher.get_error()
        except BaseException as error:  # a panic of Rust is none of `Exception`
            reason = f"{type(error).__name__}: {error}"
        return " ".join(reason.split())[:400].encode("utf-8", "replace")

    serve_job(answer)


if __name__ == "__main__":
    main()
