"""Models that load models (docs/spec/behaviours.md section 9.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils.runtime import ModelPhase

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices
    from triton_python_backend_utils.runtime import Runtime

CALLS = [
    (lambda: pb_utils.load_model("m"), "Failed to load model: "),
    (lambda: pb_utils.unload_model("m"), "Failed to unload model: "),
    (lambda: pb_utils.is_model_ready("m"), "Failed to check model readiness: "),
]


@pytest.mark.usefixtures("runtime")
def test_model_is_loaded_asked_for_and_unloaded(services: FunctionServices) -> None:
    assert not pb_utils.is_model_ready("m")
    pb_utils.load_model(model_name="m", config='{"a": 1}', files={"file:1/model.onnx": b"x"})
    assert services.loaded == {"m": ('{"a": 1}', {"file:1/model.onnx": b"x"})}
    assert pb_utils.is_model_ready(model_name="m", model_version="1")
    pb_utils.unload_model("m", unload_dependents=True)
    assert not pb_utils.is_model_ready("m")


@pytest.mark.usefixtures("runtime")
def test_refusal_says_what_failed() -> None:
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Failed to load model: failed to load 'broken', failed to poll from model repository$",
    ):
        pb_utils.load_model("broken")
    with pytest.raises(pb_utils.TritonModelException, match=r"^Failed to unload model: model 'm' is not found$"):
        pb_utils.unload_model("m")
    with pytest.raises(pb_utils.TritonModelException, match=r"^Failed to check model readiness: no version 'x'$"):
        pb_utils.is_model_ready("m", "x")


@pytest.mark.usefixtures("runtime")
def test_file_that_is_no_bytes_is_refused(services: FunctionServices) -> None:
    with pytest.raises(TypeError, match="file 'file:a' of model 'm' must be bytes, found type 'str'"):
        pb_utils.load_model("m", files={"file:a": "text"})  # type: ignore[dict-item]
    assert services.loaded == {}


@pytest.mark.parametrize(("call", "text"), CALLS)
@pytest.mark.parametrize("phase", [ModelPhase.COMPLETING, ModelPhase.FINALIZING])
def test_not_before_and_not_after_the_models_life(
    runtime: Runtime, phase: ModelPhase, call: Callable[[], object], text: str
) -> None:
    runtime.phase = phase
    with pytest.raises(pb_utils.TritonModelException, match=f"^{text}.*not supported during the '{phase.value}'"):
        call()


@pytest.mark.usefixtures("services")
def test_initialize_may_load(runtime: Runtime) -> None:
    runtime.phase = ModelPhase.INITIALIZING
    pb_utils.load_model("m")
    assert pb_utils.is_model_ready("m")


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_without_a_server_there_is_nothing_to_load(call: Callable[[], object], text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=f"^{text}there is no server"):
        call()
