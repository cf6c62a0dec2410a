"""Sends stories word by word: each word follows the previous one somewhere in corpus.txt."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils

STORIES_AT_ONCE = 16
Followers = Mapping[str, Sequence[str]]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self.pause_s = float(parameters["pause_ms"]["string_value"]) / 1000
        self.followers = learn(Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8"))
        self.senders = ThreadPoolExecutor(STORIES_AT_ONCE)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Return at once: a thread sends each story, so that the next request need not wait for its end."""
        for request in requests:
            self.senders.submit(self.answer, request, request.get_response_sender())

    def finalize(self) -> None:
        self.senders.shutdown(cancel_futures=True)

    def answer(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            self.send_story(request, sender)
        except Exception as error:  # the server cannot report it: this is a thread of the model
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"the story broke off: {error!r}")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send_story(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        prompt, words = value(request, "prompt", b"").decode(), int(value(request, "words", 0))
        story = self.story(prompt, random.Random(int(value(request, "seed", 0))))
        for sent in range(words):
            if sender.is_cancelled():
                pb_utils.Logger.log_info(f"the caller has disconnected, after {sent} of {words} words")
                return
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("word", encoded(next(story)))]))
            time.sleep(self.pause_s)

    def story(self, prompt: str, chance: random.Random) -> Iterator[str]:
        """Yield words without end, beginning with one that may follow the last word of ``prompt``."""
        word = prompt.split()[-1] if prompt.split() else ""
        while True:
            word = chance.choice(self.followers.get(word) or self.followers[""])
            yield word


def learn(text: str) -> Followers:
    """Return the words that follow each word of ``text``. Words that begin a sentence follow ""."""
    followers: defaultdict[str, list[str]] = defaultdict(list)
    before = ""
    for word in text.split():
        followers[before].append(word)
        before = "" if word.endswith(".") else word
    return followers


def value(request: pb_utils.InferenceRequest, name: str, default: Any) -> Any:
    """Return the one element of an input, or ``default`` if it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]


def encoded(word: str) -> Any:
    return np.array([word.encode()], np.object_)
