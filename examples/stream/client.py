#!/usr/bin/env python3
"""Request a story from a running server, and print each word as it arrives.

Needs: pip install "tritonclient[grpc]"
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferenceServerClient, InferenceServerException, InferInput, InferResult


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with InferenceServerClient(options.grpc) as server:
            for count, word in enumerate(story(server, options.prompt, options.words, options.seed), 1):
                print(word, end=" ", flush=True)
                if count == options.stop_after:
                    break
    except InferenceServerException as error:
        print(f"gRPC at {options.grpc}: {error}", file=sys.stderr)
        print("Is it running?  headrace serve --model-repository=examples/stream/models", file=sys.stderr)
        return 1
    print()
    return 0


def story(server: InferenceServerClient, prompt: str, words: int, seed: int) -> Iterator[str]:
    """Yield the words as they arrive. A caller that stops reading cancels the rest."""
    answers: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()
    server.start_stream(lambda result, error: answers.put((result, error)))
    try:
        server.async_stream_infer("story", inputs(prompt, words, seed), enable_empty_final_response=True)
        while True:
            result, error = answers.get()
            if result is None:
                raise error or InferenceServerException("the stream ended without a last answer")
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
            yield result.as_numpy("word")[0].decode()
    finally:
        server.stop_stream(cancel_requests=True)


def inputs(prompt: str, words: int, seed: int) -> list[InferInput]:
    return [
        _input("prompt", np.array([prompt.encode()], np.object_), "BYTES"),
        _input("words", np.array([words], np.int32), "INT32"),
        _input("seed", np.array([seed], np.int32), "INT32"),
    ]


def _input(name: str, array: npt.NDArray[np.generic], datatype: str) -> InferInput:
    made = InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompt", nargs="?", default="The", help="how it begins (default: %(default)s)")
    add("--grpc", metavar="HOST:PORT", default="localhost:8001", help="where gRPC is (default: %(default)s)")
    add("--words", metavar="N", type=int, default=40, help="words to ask for (default: %(default)s)")
    add("--stop-after", metavar="N", type=int, default=0, help="words after which the rest is cancelled")
    add("--seed", metavar="N", type=int, default=0, help="another seed, another story (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
