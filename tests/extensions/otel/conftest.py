"""A collector for the tests of a module, and a repository with two identity models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extensions.otel.collector import Collector, collecting

CONFIG = """
backend: "identity" max_batch_size: 8 metric_tags { key: "team" value: "blue" }
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "x" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
    return folder
