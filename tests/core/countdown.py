"""A decoupled model that answers a number with all from it down to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from headrace.backends.base import Backend, Model, StreamInstance
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.registry import PluginInfo
from headrace.server import Server

CONFIG = """
backend: "countdown" model_transaction_policy { decoupled: true }
input { name: "n" data_type: TYPE_INT32 dims: [1] } output { name: "left" data_type: TYPE_INT32 dims: [1] }
"""


class Countdown(StreamInstance):
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        for left in range(int(np.asarray(request.inputs["n"])[0]), 0, -1):
            if left == 13:
                raise ValueError("unlucky")
            yield InferResponse({"left": np.array([left], np.int32)})


class Countdowns(Backend):
    name: ClassVar[str] = "countdown"

    def load(self, model: Model) -> Countdown:
        return Countdown()


def with_countdowns(server: Server) -> Server:
    """Return ``server``, which has the backend ``countdown`` from now on."""
    server.plugins.backends.add(Countdowns, PluginInfo("countdown", "tests", "0"))
    return server
