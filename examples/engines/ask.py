#!/usr/bin/env python3
"""Send the 360 digits that training did not use to every digits model of a running server, and compare the results.

Needs: pip install "tritonclient[http]" scikit-learn
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import tritonclient.http

sys.path.append(str(Path(__file__).resolve().parents[1]))  # modules that all examples with digits share

from digits import held_out_digits

Client: TypeAlias = "tritonclient.http.InferenceServerClient"
Probabilities: TypeAlias = "npt.NDArray[np.float32]"

#: The allowed difference of two engines, which add up in different orders.
TOLERANCE = 1e-5
LINE = "{:20} {:12} {:>8} {:>9} {:>9} {:>11} {:>9}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return compare(tritonclient.http.InferenceServerClient(options.http), options.batch_size)
    except (OSError, tritonclient.http.InferenceServerException) as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/engines/models", file=sys.stderr)
        return 1


def compare(server: Client, batch_size: int) -> int:
    """Print a line for each model. Return 1 if one of them differs from the first, else 0."""
    digits, first = held_out_digits(), None
    is_same = True
    print(LINE.format("model", "backend", "right", "accuracy", "as first", "difference", "ms/batch"))
    for model in models_of(server):
        began = time.perf_counter()
        answers = ask(server, model, digits.images, batch_size)
        batch_ms = 1000 * (time.perf_counter() - began) / -(-len(answers) // batch_size)
        first = answers if first is None else first
        right = int((answers.argmax(1) == digits.numbers).sum())
        same = int((answers.argmax(1) == first.argmax(1)).sum())
        difference = float(np.abs(answers - first).max())
        is_same = is_same and difference < TOLERANCE
        backend = server.get_model_config(model)["backend"]
        share, apart, took = f"{right / len(answers):.1%}", f"{difference:.0e}", f"{batch_ms:.1f}"
        print(LINE.format(model, backend, right, share, same, apart, took))
    return 0 if is_same else 1


def models_of(server: Client) -> list[str]:
    """Return the names of the digits models that are ready."""
    index = server.get_model_repository_index()
    return sorted(each["name"] for each in index if each["name"].startswith("digits_") and each.get("state") == "READY")


def ask(server: Client, model: str, images: npt.NDArray[np.uint8], batch_size: int) -> Probabilities:
    """``images`` u8[rows, 8, 8] -> probabilities f32[rows, 10], requested in batches."""
    metadata = server.get_model_metadata(model)  # some formats have no names of tensors
    (takes,), (gives,) = metadata["inputs"], metadata["outputs"]
    answers = []
    for begin in range(0, len(images), batch_size):
        batch = images[begin : begin + batch_size]
        image = tritonclient.http.InferInput(takes["name"], list(batch.shape), "UINT8")
        image.set_data_from_numpy(batch)
        answers.append(server.infer(model, [image]).as_numpy(gives["name"]))
    return np.concatenate(answers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--http", metavar="HOST:PORT", default="localhost:8000", help="where HTTP is (default: %(default)s)")
    add("--batch-size", metavar="N", type=int, choices=range(1, 65), default=8, help="digits in a request, 1 to 64")
    return parser


if __name__ == "__main__":
    sys.exit(main())
