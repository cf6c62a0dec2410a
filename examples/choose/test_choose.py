"""Tests the models without a server. For `shorten`, functions replace `keep` and `summarize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_python.testing import OpenModel

MODELS = Path(__file__).parent / "models"
LONG = (MODELS.parent / "texts/long.txt").read_text()


def text(value: str) -> dict[str, Any]:
    return {"text": np.array([value.encode()], np.object_)}


def says(summary: str) -> Any:
    """Return a model that always returns ``summary``."""
    return lambda inputs: {"summary": np.array([summary.encode()], np.object_)}


@pytest.mark.parametrize(("words", "chosen"), [(1, b"keep"), (39, b"keep"), (40, b"summarize"), (5000, b"summarize")])
def test_a_text_of_forty_words_is_long(python_model: OpenModel, words: int, chosen: bytes) -> None:
    model = python_model(MODELS / "shorten", models={"keep": says("keep"), "summarize": says("summarize")})
    response = model.infer(text("word " * words))
    assert (response["summary"][0], response["model"][0]) == (chosen, chosen)


def test_a_model_that_is_not_there_is_named_to_the_caller(python_model: OpenModel) -> None:
    error = python_model(MODELS / "shorten", models={}).infer(text("short")).error
    assert error is not None
    assert "keep" in str(error)


def test_a_summary_leaves_out_what_the_text_is_not_about(python_model: OpenModel) -> None:
    summary = python_model(MODELS / "summarize").infer(text(LONG))["summary"][0].decode()
    assert summary
    assert "postcard" not in summary
    assert "Tuesday" not in summary


def test_a_text_without_sentences_has_a_summary(python_model: OpenModel) -> None:
    assert python_model(MODELS / "summarize").infer(text(""))["summary"].tolist() == [b""]
