"""A backend that is not installed: the distribution that brings it is named, and not another backend."""

from __future__ import annotations

import pytest

from headrace.errors import Code, LoadError
from headrace.plugins import Plugins

#: As Triton 2.51 says it.
TRITON = "unable to find backend library for backend '{}', try specifying runtime on the model configuration."


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "fil",
            " Its distribution, headrace-fil, is not published yet; no plugin provides backend 'fil'; ",
        ),
        (
            "onnxruntime",
            " It comes with the distribution headrace-onnx: pip install headrace-onnx; no plugin provides ",
        ),
        ("python", " It comes with the distribution headrace-python: pip install headrace-python; no plugin provides "),
        ("nobody", " no plugin provides backend 'nobody'; installed: identity"),
        ("identitty", " no plugin provides backend 'identitty'; did you mean 'identity'? installed: identity"),
        ("Identity", " no plugin provides backend 'Identity'; did you mean 'identity'? installed: identity"),
        ("onnx", " no plugin provides backend 'onnx'; did you mean 'onnxruntime'? installed: identity"),
        ("torch", " no plugin provides backend 'torch'; did you mean 'pytorch'? installed: identity"),
        ("tf", " no plugin provides backend 'tf'; did you mean 'tensorflow'? installed: identity"),
        ("tensorrt_plan", " no plugin provides backend 'tensorrt_plan'; did you mean 'tensorrt'? installed: identity"),
    ],
)
def test_a_backend_that_is_missing_is_told_as_triton_does_and_how_to_get_it(name: str, told: str) -> None:
    with pytest.raises(LoadError) as refusal:
        Plugins.discover(()).backends.get(name)
    assert refusal.value.message.startswith(TRITON.format(name) + told)
    assert ("did you mean" in refusal.value.message) == ("did you mean" in told)
    assert refusal.value.code is Code.INVALID_ARGUMENT
