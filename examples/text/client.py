#!/usr/bin/env python3
"""Embed sentences by a running server, and print their similarities.

Needs: pip install "tritonclient[http]"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tritonclient.http

SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten naps on the couch.",
    "Tax law was changed in spring.",
    "Parliament has passed a new bill on levies.",
    "Heat the oven and knead the dough.",
    "Bread is baked from flour, water and salt.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        embeddings = embed(tritonclient.http.InferenceServerClient(options.http), options.sentences)
    except (OSError, tritonclient.http.InferenceServerException) as error:
        print(f"HTTP at {options.http}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/text/models", file=sys.stderr)
        return 1
    similarities = embeddings @ embeddings.T  # cosines, for every embedding has length 1
    for row, sentence in enumerate(options.sentences):
        print(sentence)
        others = [int(other) for other in np.argsort(-similarities[row]) if other != row]
        for other in others[: options.nearest]:
            print(f"  {similarities[row, other]:.4f}  {options.sentences[other]}")
    return 0


def embed(server: tritonclient.http.InferenceServerClient, sentences: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the embeddings f32[sentences, 384], from one request."""
    text = tritonclient.http.InferInput("text", [len(sentences), 1], "BYTES")
    text.set_data_from_numpy(np.array([[sentence.encode()] for sentence in sentences], np.object_))
    return np.asarray(server.infer("embed", [text]).as_numpy("embedding"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("sentences", metavar="SENTENCE", nargs="*", default=list(SENTENCES), help="up to 64; there are some without")
    add("--http", metavar="HOST:PORT", default="localhost:8000", help="where HTTP is (default: %(default)s)")
    add("--nearest", metavar="N", type=int, default=1, help="neighbours to print of each (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
