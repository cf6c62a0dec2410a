"""An attacker that writes into a shared Redis cannot keep callers from the answer of the model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("redis")

from headrace import CachedResponse, pack_response
from tests.caches.redis.conftest import redis_program, redis_server  # noqa: F401 (fixtures)

if TYPE_CHECKING:
    from tests.caches.redis.conftest import RedisServer
    from tests.conftest import Headrace

CONFIG = """
backend: "identity" response_cache { enable: true }
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
ASKED = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2.5]}]}
Y = {"y": np.array([0.0, 0.0], np.float32)}
PLANTED = [
    pack_response(CachedResponse(Y, {"p": 1 << 64})),
    pack_response(CachedResponse(Y, {"p": -(1 << 70)})),
    pack_response(CachedResponse(Y, {"p": "\ud800"})),
    pack_response(CachedResponse(Y, {"\udfff": "v"})),
    pack_response(CachedResponse({"z": Y["y"]}, {})),
    b"HRC1" + b"\xff" * 4096,
    b"x" * (1 << 20),
]


@pytest.mark.usefixtures("of_its_own")
def test_a_poisoned_cache_keeps_nobody_from_an_answer(
    serve_models: Callable[..., Headrace],
    redis_server: RedisServer,  # noqa: F811
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
    wait_until: Callable[..., None],
) -> None:
    (tmp_path / "models" / "cached" / "1").mkdir(parents=True)
    (tmp_path / "models" / "cached" / "config.pbtxt").write_text(CONFIG)
    settings = [f"--cache-config=redis,{key}={value}" for key, value in redis_server.settings.items()]
    server = serve_models(tmp_path / "models", "--load-model=cached", *settings)

    def ask() -> tuple[int, object]:
        connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
        connection.request("POST", "/v2/models/cached/infer", json.dumps(ASKED))
        response = connection.getresponse()
        found = response.status, json.loads(response.read())["outputs"][0]["data"]
        connection.close()
        return found

    assert ask() == (200, [1.5, -2.5])
    wait_until(lambda: len(redis_server.client.keys()) == 1, "the answer is kept")
    (key,) = redis_server.client.keys()
    with under_attack(server, kept_bytes=16 << 20):
        for planted in PLANTED:
            redis_server.client.set(key, planted)
            for _ in range(3):
                assert ask() == (200, [1.5, -2.5])
