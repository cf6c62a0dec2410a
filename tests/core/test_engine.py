"""What `Engine.responses` leaves behind."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.config.options import ServerOptions
from headrace.engine import Engine
from headrace.errors import BackendError
from headrace.messages.request import InferRequest
from headrace.messages.ticket import Ticket


class Held(InferRequest):
    """A request that tells when it is freed."""

    __slots__ = ("__weakref__",)


def test_a_request_that_fails_is_free_at_once() -> None:
    """The collector of cycles does not run in these tests."""

    def enqueue(ticket: Ticket) -> None:
        ticket.respond(BackendError("broken"), True)

    view = SimpleNamespace(decoupled=False, check=lambda ticket: None, enqueue=enqueue)
    table = SimpleNamespace(resolve=lambda name, version: view)
    engine = Engine(ServerOptions(model_repository=("models",)), cast("Any", table))

    async def ask() -> weakref.ref[Held]:
        request = Held("m", {"x": np.zeros(4, np.float32)})
        held = weakref.ref(request)
        responses = engine.responses(request)
        del request
        with pytest.raises(BackendError) as caught:
            await anext(responses)
        del caught, responses
        return held

    assert asyncio.run(ask())() is None
