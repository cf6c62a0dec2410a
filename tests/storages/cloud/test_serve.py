"""`headrace serve` on a repository in S3, asked by Triton's client."""

from __future__ import annotations

import os
from collections.abc import Callable
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.http as client

from tests.conftest import Headrace, wait_until
from tests.storages.cloud.conftest import Bucket

CONFIG = b"""backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }"""


@pytest.mark.usefixtures("s3_keys")
def test_a_polled_bucket_is_served_and_followed(serve: Callable[..., Headrace], bucket: Bucket) -> None:
    prefix = uuid4().hex
    large = os.urandom(20 << 20)
    url = bucket.store(prefix, {"m": {"config.pbtxt": CONFIG, "1/weights": large}})
    words = [f"--model-repository={url}", "--model-control-mode=poll", "--repository-poll-secs=1"]
    server = serve(*words, "--cloud-settle-s=0").wait_until_ready()
    assert "model 'm': downloaded 1 files of 20.0 MiB in" in server.log
    with client.InferenceServerClient(f"127.0.0.1:{server.http}") as asked:
        x = client.InferInput("x", [1, 3], "FP32")
        x.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
        assert asked.infer("m", [x]).as_numpy("y").tolist() == [[1, 2, 3]]
        bucket.put(f"{prefix}/n/config.pbtxt", CONFIG)
        bucket.put(f"{prefix}/n/1/", b"")  # the folder that a console makes
        wait_until(lambda: asked.is_model_ready("n"), "the new model is ready")
        bucket.put(f"{prefix}/m/1/weights", b"other")
        server.wait_for_line("'m' has changed: loading it")
        server.wait_for_line("successfully loaded 'm'")
        bucket.put(f"{prefix}/m/1/weights", b"other")  # the same again: its ETag stays
        for path in ("config.pbtxt", "1/"):
            bucket.remove(f"{prefix}/n/{path}")
        wait_until(lambda: not asked.is_model_ready("n"), "the model that is gone is not ready")
        assert server.log.count("'m' has changed") == 1
        assert asked.infer("m", [x]).as_numpy("y").tolist() == [[1, 2, 3]]
    server.stop()
    assert server.complaints == []
