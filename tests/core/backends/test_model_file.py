"""A missing model file, and the suggestion if another file is in its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LoadError, Model, ModelConfig


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (
            "digits.onnx",
            ". Its directory has 'digits.onnx': rename it, or set default_model_filename: \"digits.onnx\"",
        ),
        ("digits.onnx labels.txt", ". Its directory has 'digits.onnx': rename it,"),
        ("labels.txt", ". Its directory has only 'labels.txt'"),
        ("labels.txt model.xml", ""),
        ("a.onnx b.onnx", ""),
        ("", ""),
    ],
)
def test_the_one_file_of_its_directory_or_kind_is_named(tmp_path: Path, files: str, hint: str) -> None:
    for name in files.split():
        (tmp_path / name).touch()
    with pytest.raises(LoadError) as refusal:
        Model("m", 1, tmp_path, ModelConfig()).file("model.onnx")
    reason = f"no file '{tmp_path / 'model.onnx'}' for model 'm' version 1"
    assert refusal.value.message.startswith(reason + hint)
    assert hint or refusal.value.message == reason
    assert ("rename" in refusal.value.message) == ("rename" in hint)
