"""`headrace serve` on a repository in S3, with Triton's client."""

from __future__ import annotations

import os
from collections.abc import Callable
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

from headrace_cli import main
from tests.conftest import Headrace, wait_until
from tests.storages.cloud.conftest import Bucket
from tests.storages.cloud.faulty_s3 import error, faulty_s3

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
    with client.InferenceServerClient(f"127.0.0.1:{server.http}") as connection:
        x = client.InferInput("x", [1, 3], "FP32")
        x.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
        assert connection.infer("m", [x]).as_numpy("y").tolist() == [[1, 2, 3]]
        bucket.put(f"{prefix}/n/config.pbtxt", CONFIG)
        bucket.put(f"{prefix}/n/1/", b"")  # the folder that a console makes
        wait_until(lambda: connection.is_model_ready("n"), "the new model is ready")
        bucket.put(f"{prefix}/m/1/weights", b"other")
        server.wait_for_line("'m' has changed: loading it")
        server.wait_for_line("successfully loaded 'm'")
        bucket.put(f"{prefix}/m/1/weights", b"other")  # the same content: its ETag stays
        for path in ("config.pbtxt", "1/"):
            bucket.remove(f"{prefix}/n/{path}")
        wait_until(lambda: not connection.is_model_ready("n"), "the model that is gone is not ready")
        assert server.log.count("'m' has changed") == 1
        assert connection.infer("m", [x]).as_numpy("y").tolist() == [[1, 2, 3]]
    server.stop()
    assert server.complaints == []


@pytest.mark.usefixtures("s3_keys")
def test_old_versions_keep_serving_while_the_storage_fails(serve: Callable[..., Headrace]) -> None:
    with faulty_s3() as s3:
        s3.put({"m/config.pbtxt": CONFIG, "m/1/weights": b"old"})
        words = [f"--model-repository={s3.url}", "--model-control-mode=poll", "--repository-poll-secs=1"]
        server = serve(*words, "--cloud-timeout-s=1", "--exit-on-error=false").wait_until_ready()
        with client.InferenceServerClient(f"127.0.0.1:{server.http}") as connection:
            x = client.InferInput("x", [1, 3], "FP32")
            x.set_data_from_numpy(np.ones((1, 3), np.float32))
            s3.fault = lambda request: request.answer(500, error("InternalError", "Try again."))
            line = server.wait_for_line("cannot poll the repository")
            assert (
                "listing 'models' failed. The storage answered: 500 InternalError: Try again. It was asked at" in line
            )
            assert connection.infer("m", [x]).as_numpy("y").tolist() == [[1, 1, 1]]
            s3.put({"m/1/weights": b"new"})
            s3.fault = lambda request: not request.is_listing and request.answer(403, error("AccessDenied", "No."))
            server.wait_for_line("'m' has changed: loading it")
            server.wait_for_line("403 AccessDenied: No.")
            assert connection.infer("m", [x]).as_numpy("y").tolist() == [[1, 1, 1]]
            assert connection.get_model_repository_index()[0]["state"] == "READY"
            s3.fault = None
            server.wait_for_line("successfully loaded 'm'")
            assert connection.infer("m", [x]).as_numpy("y").tolist() == [[1, 1, 1]]
    assert "password" not in server.log


@pytest.mark.usefixtures("s3_keys")
def test_a_load_that_the_storage_refuses_is_explained_to_the_caller(serve: Callable[..., Headrace]) -> None:
    with faulty_s3() as s3:
        server = serve(f"--model-repository={s3.url}", "--model-control-mode=explicit").wait_until_ready()
        s3.put({"m/config.pbtxt": CONFIG, "m/1/weights": b"x", "n/1//w": b"", "n/../w": b""})
        s3.fault = lambda request: not request.is_listing and request.answer(403, error("AccessDenied", "No."))
        with client.InferenceServerClient(f"127.0.0.1:{server.http}") as connection:
            with pytest.raises(InferenceServerException, match="403 AccessDenied: No"):
                connection.load_model("m")
            s3.fault = None
            with pytest.raises(InferenceServerException, match="cannot be the path of a file"):
                connection.load_model("n")
            for name in ("..", "../m", "m/1", "m%2f..", "m\\.."):
                count = len(s3.requests)
                with pytest.raises(InferenceServerException):
                    connection.load_model(name)
                assert not any(".." in path for path in s3.requests[count:])
            connection.load_model("m")
            assert connection.is_model_ready("m")


@pytest.mark.usefixtures("s3_keys")
def test_a_repository_in_s3_is_checked(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    bad = b'backend: "identity" max_batch_size: -1'
    url = bucket.store(
        uuid4().hex, {"good": {"config.pbtxt": CONFIG, "1/w": b""}, "bad": {"config.pbtxt": bad, "1/w": b""}}
    )
    assert main(["check", url]) == 1
    found = capsys.readouterr().out
    assert "bad" in found
    assert "max_batch_size" in found
