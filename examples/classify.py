#!/usr/bin/env python3
"""Send handwritten digits to a running server with the stock tritonclient, over HTTP and gRPC.

The server ranks the classes itself (Triton's classification extension) and names them from the
model's label file. The digits are the ones that examples/train_digits.py did not use.

Needs: pip install "tritonclient[http,grpc]" scikit-learn
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from digits import Digits, held_out_digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
INK = " .:-=+*#%@"
WHITE = 16  #: the highest value of a pixel

Classify = Callable[[npt.NDArray[np.uint8]], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    digits = held_out_digits()
    labels: list[str] = []
    for protocol, client, url in (("HTTP", tritonclient.http, options.http), ("gRPC", tritonclient.grpc, options.grpc)):
        try:
            labels = _classify_all(protocol, _classifier(client, url, options.model), digits, options.batch_size)
        except (OSError, tritonclient.http.InferenceServerException) as error:
            print(f"{protocol} at {url}: {error}", file=sys.stderr)
            print("Is it running?  headrace serve --model-repository=examples/models", file=sys.stderr)
            return 1
    for row in _misread(labels, digits)[: options.pictures]:
        print(f"\n{_drawing(digits.images[row])}\n  a {WORDS[digits.numbers[row]]}, read as {labels[row]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--http", metavar="HOST:PORT", default="localhost:8000", help="where HTTP is (default: %(default)s)")
    add("--grpc", metavar="HOST:PORT", default="localhost:8001", help="where gRPC is (default: %(default)s)")
    add("--model", metavar="NAME", default="digits", help="the model to ask (default: %(default)s)")
    add("--batch-size", metavar="N", type=int, choices=range(1, 65), default=8, help="digits in a request, 1 to 64")
    add("--pictures", metavar="N", type=int, default=2, help="misread digits to draw (default: %(default)s)")
    return parser


def _classifier(client: ModuleType, url: str, model: str) -> Classify:
    """Return a function from ``images`` u8[rows, 8, 8] to one label per row. Both clients have the same interface."""
    server = client.InferenceServerClient(url)

    def classify(images: npt.NDArray[np.uint8]) -> list[str]:
        image = client.InferInput("image", list(images.shape), "UINT8")
        image.set_data_from_numpy(images)
        best = client.InferRequestedOutput("probabilities", class_count=1)
        result: Any = server.infer(model, [image], outputs=[best])
        # Each class has the form "score:index:label".
        return [text.decode().split(":")[2] for text in result.as_numpy("probabilities").ravel()]

    return classify


def _classify_all(protocol: str, classify: Classify, digits: Digits, batch_size: int) -> list[str]:
    """Return the label of each digit. Prints the progress to a terminal, and the accuracy at the end."""
    labels: list[str] = []
    for images in _batches(digits.images, batch_size):
        labels += classify(images)
        if sys.stdout.isatty():
            print(f"{protocol}: {len(labels)} of {len(digits.images)} digits", end="\r", flush=True)
    right = len(labels) - len(_misread(labels, digits))
    print(f"{protocol}: {right} of {len(labels)} right, accuracy {right / len(labels):.1%}")
    return labels


def _misread(labels: Sequence[str], digits: Digits) -> list[int]:
    return [row for row, label in enumerate(labels) if label != WORDS[digits.numbers[row]]]


def _batches(images: npt.NDArray[np.uint8], size: int) -> Iterator[npt.NDArray[np.uint8]]:
    for begin in range(0, len(images), size):
        yield images[begin : begin + size]


def _drawing(image: npt.NDArray[np.uint8]) -> str:
    """Return the picture of the digit, two characters per pixel."""
    shades = image.astype(int) * (len(INK) - 1) // WHITE
    return "\n".join("  " + "".join(INK[shade] * 2 for shade in row) for row in shades.tolist())


if __name__ == "__main__":
    sys.exit(main())
