"""What the server takes from a child, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.workers.process.desk import Desk
from penstock.workers.process.wire.codec import Decoder, Encoder
from penstock.workers.process.wire.failure import WireError
from penstock.workers.process.wire.frames import Frames
from penstock.workers.process.wire.updates import update_frame


@pytest.fixture
def hear() -> Callable[[bytes], None]:
    """Has a desk, whose child holds nothing, hear a message."""
    desk = Desk(cast("Any", None), "m")
    desk.open(Encoder(None), Decoder(None, lambda offset: None), lambda message: None, {})

    def hear(message: bytes) -> None:
        for heard in Frames().feed(message):
            desk.hear(heard, lambda reply: None)

    return hear


@pytest.mark.parametrize("handle", [0, 1, 2**64 - 1])
def test_a_child_cannot_change_a_metric_that_it_does_not_hold(hear: Callable[[bytes], None], handle: int) -> None:
    with pytest.raises(WireError, match=f"metric {handle}, which the child does not hold"):
        hear(update_frame(handle, "increment", 1.0))
