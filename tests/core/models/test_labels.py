"""Label files: lines are kept as they are, and a file outside of the model is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Code, LoadError, Unsupported
from headrace.models.labels import check_labels, read_labels


def config(*files: str) -> ModelConfig:
    made = ModelConfig(name="m")
    for number, file in enumerate(files):
        made.output.add(name=f"y{number}", label_filename=file)
    return made


def test_lines_are_kept_blank_ones_too(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("cat\n\nhörnchen\r\nlast".encode())
    (tmp_path / "ended.txt").write_text("a\nb\n")
    labels = read_labels(config("labels.txt", "", "ended.txt"), tmp_path)
    assert labels == {"y0": ["cat", "", "hörnchen\r", "last"], "y2": ["a", "b"]}


@pytest.mark.parametrize("file", ["../labels.txt", "/etc/passwd", "a/../../labels.txt", "a\\b"])
def test_a_file_outside_of_the_model_is_not_read(tmp_path: Path, file: str) -> None:
    (tmp_path / "labels.txt").write_text("secret")
    model = tmp_path / "m"
    model.mkdir()
    with pytest.raises(Unsupported, match="is outside model directory"):
        read_labels(config(file), model)
    assert list(check_labels(config(file), model)) == []  # the rules of paths refuse it


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    for file in ("missing.txt", "bytes.txt", "folder"):
        with pytest.raises(LoadError, match=f"cannot read label file '{tmp_path}/{file}' for output 'y0' of model 'm'"):
            read_labels(config(file), tmp_path)
    (tmp_path / "good.txt").write_text("a")
    (problem,) = check_labels(config("good.txt", "missing.txt"), tmp_path)
    assert (problem.field, problem.code) == ("output[1].label_filename", LoadError("").code)
    assert problem.code is not Code.UNSUPPORTED
