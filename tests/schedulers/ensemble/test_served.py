"""Ensembles as callers see them: over every protocol, beside the models that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import Server
from headrace.testing.serving import WAYS

from .conftest import Write, ensemble, identity, step

ROW = np.array([[1, 2]], np.float32)


@pytest.mark.parametrize("over", WAYS)
def test_two_models_answer_as_one(
    over: str, write: Write, headrace_server: Callable[..., Server], infer: Callable[..., dict[str, Any]]
) -> None:
    write("one", identity())
    write("two", identity("c", "d"))
    write("e", ensemble([step("two", "c=mid", "d=y"), step("one", "a=x", "b=mid")]))
    server = headrace_server()
    np.testing.assert_array_equal(np.asarray(infer(server, "e", {"x": ROW}, over=over)["y"]), ROW)
    answer = server.infer("e", {"x": ROW})
    assert (answer.model_name, answer.model_version) == ("e", "1")
    assert [server.served(name)[0].snapshot().success.count for name in ("one", "two", "e")] == [2, 2, 2]
