#!/usr/bin/env python3
"""Shorten a text by a running server, and print the model that did it.

Needs: pip install "tritonclient[http]"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tritonclient.http


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        model, summary = shorten(tritonclient.http.InferenceServerClient(options.http), _read(options.file))
    except (OSError, tritonclient.http.InferenceServerException) as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/choose/models", file=sys.stderr)
        return 1
    print(f"{model}: {summary}")
    return 0


def shorten(server: tritonclient.http.InferenceServerClient, text: str) -> tuple[str, str]:
    """Return the chosen model, and its result for ``text``."""
    tensor = tritonclient.http.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
    answer = server.infer("shorten", [tensor])
    return answer.as_numpy("model")[0].decode(), answer.as_numpy("summary")[0].decode()


def _read(file: Path | None) -> str:
    return sys.stdin.read() if file is None else file.read_text(encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="the text; standard input without")
    add("--http", metavar="HOST:PORT", default="localhost:8000", help="where HTTP is (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
