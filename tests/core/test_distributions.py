"""A backend that is not installed: the distribution that brings it is named, and not another backend."""

from __future__ import annotations

import pytest

from headrace.errors import LoadError
from headrace.plugins import Plugins

#: As Triton 2.51 says it.
TRITON = "unable to find backend library for backend '{}', try specifying runtime on the model configuration."


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "vllm",
            " Its distribution, headrace-vllm, is not published yet; no plugin provides backend 'vllm'; ",
        ),
        (
            "onnxruntime",
            " It comes with the distribution headrace-onnx: pip install headrace-onnx; no plugin provides ",
        ),
        ("python", " It comes with the distribution headrace-python: pip install headrace-python; no plugin provides "),
        ("nobody", " no plugin provides backend 'nobody'; installed: identity"),
        ("identitty", " no plugin provides backend 'identitty'; did you mean 'identity'? installed: identity"),
    ],
)
def test_a_backend_that_is_missing_is_told_as_triton_does_and_how_to_get_it(name: str, told: str) -> None:
    with pytest.raises(LoadError) as refusal:
        Plugins.discover(()).backends.get(name)
    assert refusal.value.message.startswith(TRITON.format(name) + told)
    assert ("did you mean" in refusal.value.message) == (name == "identitty")
