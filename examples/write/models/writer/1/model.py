"""Continues to the end of a sentence: each word follows the previous two somewhere in corpus.txt."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        words = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").split()
        self.followers: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for place, word in enumerate(words):
            for before in (words[place - 2 : place], words[place - 1 : place], []):
                self.followers[tuple(before)].append(word)

    async def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Answer all requests at once; the next ones need not wait for the end of these."""
        await asyncio.gather(*(self.write(request, request.get_response_sender()) for request in requests))

    async def write(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        sampling = json.loads(value(request, "sampling_parameters", b"{}"))
        chance, prompt = random.Random(sampling.get("seed")), value(request, "text_input", b"").decode()
        words, text, streams = prompt.split(), "", bool(value(request, "stream", False))
        for remaining in reversed(range(int(sampling.get("max_tokens", 16)))):
            if sender.is_cancelled():
                break
            keys = [tuple(words[-2:]), tuple(words[-1:]), ()]
            known = next(self.followers[key] for key in keys if key in self.followers)
            words.append(known[0] if sampling.get("temperature") == 0 else chance.choice(known))
            text += f" {words[-1]}"
            reason = "stop" if text.endswith(".") else "None" if remaining else "length"
            if streams or reason != "None":
                outputs = {"text_output": text, "finish_reason": reason}
                tensors = [
                    pb_utils.Tensor(name, np.array([each.encode()], np.object_)) for name, each in outputs.items()
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
                text = ""
            if reason != "None":
                break
            await asyncio.sleep(0.02)  # as long as a larger model needs for a word
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def value(request: pb_utils.InferenceRequest, name: str, default: Any) -> Any:
    """Return the one element of an input, or ``default`` if it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0]
