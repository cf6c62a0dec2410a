"""The flags: refused values, and the directory of the cache."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError
from headrace_cloud import CloudStorageOptions


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cache_size_mb", -1, "--cloud-cache-size-mb is -1; the least is 0"),
        ("parallel", 0, "--cloud-parallel is 0, not 1 to 64"),
        ("parallel", 65, "--cloud-parallel is 65, not 1 to 64"),
        ("timeout_s", 0.0, "--cloud-timeout-s is 0.0; the least is 0.1"),
        ("timeout_s", float("nan"), "--cloud-timeout-s is nan, not 0 to 3600"),
        ("settle_s", -1.0, "--cloud-settle-s is -1.0, not 0 to 3600"),
        ("ready_file", "a/b", "--cloud-ready-file is 'a/b', a path"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(field: str, value: object, message: str) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        CloudStorageOptions(**options)


def test_schemes_are_separated_by_commas() -> None:
    assert CloudStorageOptions(schemes="hf, HTTPS,").allowed_schemes == {"hf", "https"}
    assert CloudStorageOptions().allowed_schemes == frozenset()


def test_the_flag_takes_precedence_over_tritons_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path))
    assert CloudStorageOptions(cache_directory="/srv/cache").cache_path("s3") == Path("/srv/cache")
    assert CloudStorageOptions().cache_path("s3") == tmp_path
    assert CloudStorageOptions().cache_path("hf") == Path(tempfile.gettempdir())
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"TRITON_AWS_MOUNT_DIRECTORY names '.*/nowhere', which is not a directory"):
        CloudStorageOptions().cache_path("s3")
