"""Calls of a model to its server: log, load and unload (docs/spec/behaviours.md section 9.2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils.runtime import ModelPhase

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices
    from triton_python_backend_utils.runtime import Runtime

Logger = pb_utils.Logger


@pytest.mark.usefixtures("runtime")
def test_a_log_line_has_the_place_in_the_models_code(services: FunctionServices) -> None:
    first = sys._getframe().f_lineno + 1
    Logger.log("m")
    Logger.log("m", Logger.ERROR)
    Logger.log("m", level=Logger.LogLevel.WARNING)
    Logger.log_info("i")
    Logger.log_warn("w")
    Logger.log_error("e")
    Logger.log_verbose("v")

    expected = [("info", "m"), ("error", "m"), ("warning", "m"), ("info", "i")]
    expected += [("warning", "w"), ("error", "e"), ("verbose", "v")]
    assert services.lines == [(*line, "test_server_calls.py", first + n) for n, line in enumerate(expected)]


def test_without_a_server_lines_are_printed_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Logger.log_warn("careful")
    assert capsys.readouterr().out == "warning: careful\n"


def test_levels_have_tritons_numbers() -> None:
    assert [Logger.INFO, Logger.WARNING, Logger.ERROR, Logger.VERBOSE] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("message", "level", "kind"),
    [
        (3, Logger.INFO, TypeError),
        (None, Logger.INFO, TypeError),
        (["m"], Logger.INFO, TypeError),
        ("m", 7, TypeError),
        ("m", 1, TypeError),
        ("m", True, TypeError),
        ("m", np.int32(1), TypeError),
        ("m", None, TypeError),
        ("m", "INFO", TypeError),
    ],
)
def test_an_invalid_log_message_is_refused(message: Any, level: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Logger.log(message, level)


@pytest.mark.usefixtures("runtime")
def test_any_bytes_are_a_log_message(services: FunctionServices) -> None:
    Logger.log(b"m")
    Logger.log_info(bytearray(b"i"))
    Logger.log_warn(np.str_("w"))
    Logger.log_error(np.bytes_(b"e"))
    Logger.log_verbose(b"\xffv")
    assert [line[1] for line in services.lines] == ["m", "i", "w", "e", "\\xffv"]
    assert {type(line[1]) for line in services.lines} == {str}


CALLS = [
    (lambda: pb_utils.load_model("m"), "Failed to load model: "),
    (lambda: pb_utils.unload_model("m"), "Failed to unload model: "),
    (lambda: pb_utils.is_model_ready("m"), "Failed to check model readiness: "),
]


@pytest.mark.usefixtures("runtime")
def test_a_model_is_loaded_queried_and_unloaded(services: FunctionServices) -> None:
    assert not pb_utils.is_model_ready("m")
    pb_utils.load_model(model_name="m", config='{"a": 1}', files={"file:1/model.onnx": b"x"})
    assert services.loaded == {"m": ('{"a": 1}', {"file:1/model.onnx": b"x"})}
    assert pb_utils.is_model_ready(model_name="m", model_version="1")
    pb_utils.unload_model("m", unload_dependents=True)
    assert not pb_utils.is_model_ready("m")


@pytest.mark.usefixtures("runtime")
def test_a_refusal_names_the_failed_call() -> None:
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
def test_calls_outside_of_a_models_life_are_refused(
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
