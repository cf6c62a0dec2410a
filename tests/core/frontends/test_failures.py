"""The text of a failure for callers has no path of the machine."""

from __future__ import annotations

import logging
import time

import pytest

from headrace.frontends.failures import learn_paths, without_paths

SECRET = "secret-folder"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("failed to stat file /tmp/secret-folder/models: no", "failed to stat file .../models: no"),
        ('  File "/usr/secret-folder/m/1/model.py", line 3, in execute', '  File ".../model.py", line 3, in execute'),
        ("'/home/secret-folder/my models/x.onnx' is no model", "'.../x.onnx' is no model"),
        (
            "[Errno 2] No such file or directory: '/tmp/secret-folder/a b'",
            "[Errno 2] No such file or directory: '.../a b'",
        ),
        ("/tmp/secret-folder/one:/usr/secret-folder/two", ".../one:.../two"),
        ("at file:///tmp/secret-folder/x.", "at file:.../x."),
        ("(/tmp/secret-folder/x)", "(.../x)"),
        ("/tmp/secret-folder/models/", ".../models"),
        ("path=/tmp/secret-folder/x", "path=.../x"),
        ("//tmp//secret-folder///x", ".../x"),
        ("/tmp", ".../tmp"),
    ],
)
def test_a_path_is_shortened_to_its_last_name(text: str, shown: str) -> None:
    assert without_paths(text) == shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    "text",
    [
        "unexpected inference input '/encoder/layer.0/MatMul_output_0' for model 'm'",
        "Non-zero status code returned while running Reshape node. Name:'/decoder/Reshape'",
        "no handler for /v2/models/m/infer",
        "shape [1/2] and 3 / 4, either/or, s3://bucket/tmp/x",
        "/tmpfile and a/tmp/b",
        "",
    ],
)
def test_text_that_is_no_path_of_the_machine_stays(text: str) -> None:
    assert without_paths(text) == text


def test_a_verbose_log_keeps_whole_paths_in_answers(caplog: pytest.LogCaptureFixture) -> None:
    text = "failed to stat file /tmp/secret-folder/models"
    caplog.set_level(logging.DEBUG, "headrace")
    assert without_paths(text) == text


def test_a_missing_repository_is_named_without_its_path() -> None:
    text = "failed to stat file /not-there-7c1/models: no"
    assert without_paths(text) == text
    learn_paths(["/not-there-7c1/models"])
    assert without_paths(text) == "failed to stat file .../models: no"


@pytest.mark.parametrize("unit", ["/", "'/tmp", "/tmp", "\"/tmp'", "'/tmp/a ", "/tmp/", " /tmp(", "file:///"])
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    def seconds(count: int) -> float:
        text, times = unit * count, []
        for _ in range(5):
            started = time.process_time()  # what a busy machine adds is not ours
            without_paths(text)
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(80_000) < 16 * 4 * max(seconds(5_000), 1e-4)  # quadratic: 256 times
