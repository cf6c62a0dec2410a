#!/usr/bin/env python3
"""Send digits row by row to a running server, and compare each result with that of the unrolled net.

Needs: pip install "tritonclient[http]" scikit-learn
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from digits import held_out_digits
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

ROWS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="localhost:8000", help="where the server is (default: %(default)s)")
    parser.add_argument("--digits", type=int, default=40, help="how many to read (default: %(default)s)")
    options = parser.parse_args(arguments)
    digits = held_out_digits()
    right = np.zeros(ROWS, np.int64)
    images, numbers = digits.images[: options.digits], digits.numbers[: options.digits]
    try:
        with InferenceServerClient(options.http) as server:
            for digit, (image, number) in enumerate(zip(images, numbers, strict=True), 1):
                scores = read(server, digit, image)
                if not np.array_equal(scores, ask(server, "unrolled", "image", image)):
                    print(f"digit {digit}: the unrolled net says something else", file=sys.stderr)
                    return 1
                right += scores.argmax(1) == number
    except (InferenceServerException, ConnectionError) as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/rows/models", file=sys.stderr)
        return 1
    for rows, count in enumerate(right, 1):
        print(f"after {rows} rows {count} of {len(images)} right")
    print("every answer is that of the unrolled net")
    return 0


def read(server: InferenceServerClient, id: int, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the probabilities of ``image`` after each row, as the sequence ``id``: f32[8, 10]."""
    scores = [
        ask(server, "reader", "row", row, sequence_id=id, sequence_start=place == 0, sequence_end=place == ROWS - 1)
        for place, row in enumerate(image)
    ]
    return np.stack(scores)


def ask(
    server: InferenceServerClient, model: str, name: str, value: npt.NDArray[np.uint8], **sequence: object
) -> npt.NDArray[np.float32]:
    tensor = InferInput(name, [1, *value.shape], "UINT8")
    tensor.set_data_from_numpy(value[np.newaxis])
    found: npt.NDArray[np.float32] = server.infer(model, [tensor], **sequence).as_numpy("probabilities")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
