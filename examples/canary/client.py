#!/usr/bin/env python3
"""Send many requests for the area of a circle to a router, and print which versions answered.

Needs: pip install "tritonclient[http]"
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import tritonclient.http


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    server = tritonclient.http.InferenceServerClient(options.http)
    try:
        server.get_model_metadata("canary")
    except (OSError, tritonclient.http.InferenceServerException) as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/canary/models", file=sys.stderr)
        return 1
    counts: Counter[str] = Counter()
    for _ in range(options.requests):
        counts[ask(server, options.radius)] += 1
    for answer, count in sorted(counts.items()):
        print(f"{count:5} times {answer}")
    return 0


def ask(server: tritonclient.http.InferenceServerClient, radius: float) -> str:
    """Return the response to one request, and the version that sent it."""
    tensor = tritonclient.http.InferInput("radius", [1], "FP64")
    tensor.set_data_from_numpy(np.array([radius]))
    try:
        answer = server.infer("canary", [tensor])
    except tritonclient.http.InferenceServerException as error:
        return f"an error: {str(error.message()).splitlines()[0]}"
    target = answer.get_response()["parameters"]["headrace_target"]
    return f"{answer.as_numpy('area')[0]:.4f} by {target}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--radius", type=float, default=2.0, help="of the circle (default: %(default)s)")
    add("--requests", type=int, default=100, help="how many are sent (default: %(default)s)")
    add("--http", metavar="HOST:PORT", default="localhost:8000", help="where HTTP is (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
