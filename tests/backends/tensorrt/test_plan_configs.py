"""The fields of a config that a plan completes, or must match; the file and the engine of an instance."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, Device, HeadraceError, LoadError, Model, Shared
from headrace_tensorrt import Parameters, TensorRT

IO = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }'


def completed(plans: Any, path: Path, config: str = "") -> Any:
    model = plans.model(path, config)
    TensorRT({}).complete_config(model)
    return model.config


def refusal(plans: Any, path: Path, config: str, error: type[HeadraceError] = ConfigError) -> str:
    with pytest.raises(error) as raised:
        plans.serve(path, config)
    message: str = raised.value.message
    return message


# ---------------------------------------------------------------------------
# Completion
# ---------------------------------------------------------------------------


def test_a_config_is_completed_from_a_plan(plans: Any) -> None:
    config = completed(plans, plans.add(most=32))
    assert config.max_batch_size == 32
    assert config.HasField("dynamic_batching")
    assert [(io.name, io.data_type, list(io.dims)) for io in config.input] == [("A", 11, [16]), ("B", 11, [16])]
    assert [(io.name, list(io.dims)) for io in config.output] == [("S", [16]), ("D", [16])]


def test_a_fixed_first_axis_is_no_batch(plans: Any) -> None:
    config = completed(plans, plans.copy(shape=(2, 4)))
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [2, 4])
    assert not config.HasField("dynamic_batching")


def test_the_largest_batch_is_that_of_the_profiles_of_the_group(plans: Any) -> None:
    path = plans.copy(profiles=[{"x": [[1, 4], [1, 4], [2, 4]]}, {"x": [[1, 4], [8, 4], [16, 4]]}])
    assert completed(plans, path).max_batch_size == 2
    assert completed(plans, path, 'instance_group { profile: "1" }').max_batch_size == 16
    assert completed(plans, path, 'instance_group { profile: [ "0", "1" ] }').max_batch_size == 16


def test_a_batch_larger_than_the_plans_is_refused(plans: Any) -> None:
    assert refusal(plans, plans.copy(), "max_batch_size: 9") == (
        "autofill failed for model 'm': configuration specified max-batch 9 but TensorRT engine only supports "
        "max-batch 8"
    )
    assert refusal(plans, plans.copy(), f"max_batch_size: 9 {IO}") == (
        "unexpected configuration maximum batch size 9 for 'm_0_0', model maximum is 8"
    )


def test_shape_tensors_and_formats_are_completed(plans: Any, step: Any) -> None:
    path = plans.write(
        {"x": ("HALF", (-1, 8, 2, 2)), "s": ("INT32", (4,))}, {"y": ("HALF", (-1, 8, 2, 2))},
        [step("copy", "x", "y")],
        [{"x": [[rows, 8, 2, 2] for rows in (1, 2, 4)], "s": [[4]] * 3, "s.values": [[1] * 4, [2] * 4, [9] * 4]}],
        tensors={"s": {"is_shape": True}, "x": {"format": "CHW4"}},
    )  # fmt: skip
    config = completed(plans, path)
    marks = [(io.name, list(io.dims), io.is_shape_tensor, io.is_non_linear_format_io) for io in config.input]
    assert marks == [("x", [8, 2, 2], False, True), ("s", [3], True, False)]
    assert config.max_batch_size == 4
    x = np.arange(64, dtype=np.float16).reshape(2, 8, 2, 2)
    outputs = plans.serve(path).execute({"x": x, "s": np.array([1, 2, 3], np.int32)})
    np.testing.assert_array_equal(outputs["y"], x)


# ---------------------------------------------------------------------------
# Agreement
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            IO.replace("FP32", "FP16", 1),
            "unable to load model 'm', configuration expects datatype TYPE_FP16 for input 'x', model provides "
            "TYPE_FP32",
        ),
        (IO.replace('"x"', '"a"'), "unexpected inference input 'a', allowed inputs are: x"),
        (
            IO.replace("dims: 4", "dims: 5", 1),
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,5])",
        ),
        (
            IO.replace("dims: 4", "dims: 4 is_shape_tensor: true", 1),
            "input 'x' for model 'm' is incorrectly marked as a shape tensor in the model configuration.",
        ),
        (
            IO.replace("dims: 4", "dims: 4 is_non_linear_format_io: true", 1),
            "model 'm': tensor 'x' is incorrectly marked as a non-linear format IO in the model configuration: its "
            "format is linear",
        ),
        (
            f'{IO} instance_group {{ profile: [ "0", "3" ] }}',
            "unable to load model 'm': Can not set the specified optimization profile 3. Expected optimization profile "
            "index range 0-0",
        ),
    ],
)
def test_a_config_that_contradicts_the_plan_is_refused(plans: Any, config: str, message: str) -> None:
    assert refusal(plans, plans.copy(), f"max_batch_size: 8 {config}") == message


@pytest.mark.parametrize(
    ("dims", "is_marked", "message"),
    [
        ("2", True, ""),
        ("3", True, "unable to load model 'm', binding 's' shape expected by framework [3] doesn't match model "
                    "configuration shape [3]"),
        ("2", False, "input 's' for model 'm' is a shape tensor but the model configuration doesn't mark it as a shape "
                     "tensor."),
    ],
)  # fmt: skip
def test_a_shape_tensor_must_be_marked(plans: Any, step: Any, dims: str, is_marked: bool, message: str) -> None:
    path = plans.write(
        {"x": ("FLOAT", (-1, 1)), "s": ("INT32", (3,))}, {"y": ("FLOAT", (-1, 1))}, [step("copy", "x", "y")],
        [{"x": [[1, 1], [2, 1], [4, 1]], "s": [[3]] * 3, "s.values": [[1] * 3, [2] * 3, [9] * 3]}],
        tensors={"s": {"is_shape": True}},
    )  # fmt: skip
    mark = "is_shape_tensor: true" if is_marked else ""
    config = f"""max_batch_size: 4 input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
        input {{ name: "s" data_type: TYPE_INT32 dims: {dims} {mark} }}
        output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}"""
    if message:
        assert refusal(plans, path, config) == message
    else:
        plans.serve(path, config)


def test_a_profile_without_bounds_of_values_is_refused(plans: Any, step: Any) -> None:
    io = ("FLOAT", (-1, 1))
    path = plans.write(
        {"x": io, "s": ("INT32", (3,))}, {"y": io}, [step("copy", "x", "y")],
        [{"x": [[1, 1], [2, 1], [4, 1]], "s": [[3]] * 3, "s.values": []}], tensors={"s": {"is_shape": True}},
    )  # fmt: skip
    assert "profile 0 does not say what the values of shape tensor 's' may be" in refusal(plans, path, "", LoadError)


def test_a_format_must_be_marked_and_have_no_filling(plans: Any) -> None:
    io = """max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ 8, 2, 2 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 8, 2, 2 ] }"""
    path = plans.copy(shape=(-1, 8, 2, 2), tensors={"x": {"format": "CHW4"}})
    assert "has a non-linear IO format (vectorized format CHW4)" in refusal(plans, path, io)
    filled = plans.copy(shape=(-1, 3, 2, 2), name="filled", tensors={"x": {"format": "CHW4"}})
    assert "which fills its axis 1 up" in refusal(plans, filled, "", LoadError)


@pytest.mark.parametrize("element", ["FP8", "INT4", "FP4"])
def test_a_type_that_the_protocol_does_not_have_is_named(plans: Any, element: str) -> None:
    assert f"unsupported datatype {element} for input 'x' for model 'm'" in refusal(
        plans, plans.copy(element), "", LoadError
    )


# ---------------------------------------------------------------------------
# Files, engines, parameters
# ---------------------------------------------------------------------------


def test_each_gpu_gets_the_plan_for_its_compute_capability(plans: Any, step: Any) -> None:
    """The stand-in's GPU 0 is a 9.0, its GPU 1 an 8.9."""
    path = plans.add()
    swapped = [step("sub", "AB", "S"), step("add", "AB", "D")]
    io = ("FLOAT", (-1, 16))
    profile = {each: [[1, 16], [4, 16], [8, 16]] for each in "AB"}
    plans.write({"A": io, "B": io}, {"S": io, "D": io}, swapped, [profile], file="ada.plan")
    config = 'cc_model_filenames { key: "8.9" value: "ada.plan" }'
    a = np.ones((1, 16), np.float32)
    assert plans.serve(path, config, gpu=0).execute({"A": a, "B": a})["S"][0, 0] == 2
    assert plans.serve(path, config, gpu=1).execute({"A": a, "B": a})["S"][0, 0] == 0
    assert "no file" in refusal(plans, path, 'cc_model_filenames { key: "9.0" value: "none.plan" }', LoadError)


def test_a_plan_stays_inside_the_model(plans: Any) -> None:
    config = 'cc_model_filenames { key: "9.0" value: "../../other/1/model.plan" }'
    assert "is outside the model directory" in refusal(plans, plans.copy(), config, LoadError)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is no TensorRT plan: it is empty"), (b"ftrt broken", "Serialization (magic tag)")],
)
def test_a_file_that_is_no_plan_is_refused_with_the_error_of_tensorrt(plans: Any, content: bytes, reason: str) -> None:
    path = plans.copy()
    (path / "model.plan").write_bytes(content)
    message = refusal(plans, path, "", LoadError)
    assert str(path / "model.plan") in message
    assert reason in message


def test_the_instances_of_a_gpu_share_one_engine(plans: Any, calls: Any) -> None:
    backend, path = TensorRT({}), plans.copy()
    pool: Shared[tuple[int, int], Any] = Shared()
    model: Model = plans.model(path, f"max_batch_size: 8 {IO}", shared=pool, instance_name="m_0_0")
    instances = [backend.load(replace(model, device=Device("gpu", gpu))) for gpu in (0, 0, 1, 0, 1)]
    assert [name for name, _ in calls].count("deserialize_cuda_engine") == 2
    assert [name for name, _ in calls].count("create_execution_context") == 5
    for instance in instances:
        instance.close()
    backend.unshare(pool)


def test_an_accelerator_core_is_chosen_by_secondary_devices(plans: Any, calls: Any) -> None:
    group = "instance_group {{ name: 'm_0' secondary_devices {{ kind: KIND_NVDLA device_id: {} }} }}"
    plans.serve(plans.copy(), f"max_batch_size: 8 {IO} {group.format(0)}")
    assert [arguments[1] for name, arguments in calls if name == "deserialize_cuda_engine"] == [0]
    assert "there is no NVDLA core 1" in refusal(plans, plans.copy(), f"max_batch_size: 8 {IO} {group.format(1)}")


def test_a_plan_with_host_code_needs_the_operators_word(plans: Any) -> None:
    path = plans.copy(host_code=True)
    assert "the plan has host code, which is not allowed" in refusal(plans, path, "", LoadError)
    plans.serve(path, backend=TensorRT({"version-compatible": "true"}))
    with pytest.raises(ConfigError, match="version-compatible of 'tensorrt' must be true or false, got 'maybe'"):
        plans.serve(path, backend=TensorRT({"version-compatible": "maybe"}))


def test_the_error_has_the_reason_of_tensorrt(plans: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(logger: Any) -> None:
        logger.log(recorded.Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(recorded, "Runtime", refuse)
    message = refusal(plans, plans.copy(), "", LoadError)
    assert message.startswith("TensorRT cannot start: pybind11::init(): factory function returned nullptr: CUDA init")


def test_libraries_of_layers_are_loaded_once(plans: Any, calls: Any) -> None:
    backend = TensorRT({"plugins": "/opt/a_good.so;/opt/b_good.so"})
    for _ in range(2):
        plans.serve(plans.copy(), backend=backend)
    assert [arguments for name, arguments in calls if name == "load_library"] == [
        ("/opt/a_good.so",), ("/opt/b_good.so",),
    ]  # fmt: skip
    more = TensorRT({"plugins": "/opt/b_good.so;/opt/c_good.so;/opt/bad"})
    for _ in range(2):
        with pytest.raises(LoadError, match="backend option plugins: '/opt/bad' cannot be loaded"):
            plans.serve(plans.copy(), backend=more)
    assert [arguments for name, arguments in calls if name == "load_library"][2:] == [
        ("/opt/c_good.so",), ("/opt/bad",), ("/opt/bad",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            Parameters(execution_context_allocation_strategy="LAZY"),
            "Invalid value for 'execution_context_allocation_strategy': 'LAZY' for model instance 'm_0_0'. Supported "
            "values are 'STATIC' and 'ON_PROFILE_CHANGE'.",
        ),
        (
            Parameters(enable_multi_device=True),
            "instance 'm_0_0': enable_multi_device asks for one plan on several GPUs, which this version does not have",
        ),
    ],
)
def test_unsupported_parameters_are_refused(plans: Any, parameters: Parameters, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plans.serve(plans.copy(), parameters=parameters)
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("optimization", "priority"), [("", 0), ("priority: PRIORITY_MAX", -5), ("priority: PRIORITY_MIN", 0)]
)
def test_the_stream_has_the_priority(
    plans: Any, caplog: pytest.LogCaptureFixture, optimization: str, priority: int
) -> None:
    caplog.set_level(logging.INFO, "headrace.tensorrt")
    plans.serve(plans.copy(), f"optimization {{ {optimization} }}")
    message = f"Created instance m_0_0 on GPU 0 with stream priority {priority} and optimization profile 0"
    assert message in caplog.messages


def test_settings_without_an_effect_are_logged(plans: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.tensorrt")
    plans.serve(plans.copy(), "optimization { eager_batching: true cuda { output_copy_stream: true } }")
    assert [text.partition(" has")[0] for text in caplog.messages if "no effect" in text] == [
        "model 'm': optimization.cuda.output_copy_stream", "model 'm': optimization.eager_batching",
    ]  # fmt: skip


# ---------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------


def scaled(plans: Any, step: Any, **more: Any) -> Path:
    """``y = k * x`` with ``k`` 2."""
    io = ("FLOAT", (-1, 4))
    compute = [step("scale", "x", "y", weight="k")]
    profile = {"x": [[1, 4], [2, 4], [8, 4]]}
    path: Path = plans.write({"x": io}, {"y": io}, compute, [profile], weights={"k": [2.0]}, **more)
    return path


def test_a_plan_is_refitted_with_weights_of_a_file(plans: Any, step: Any) -> None:
    path = scaled(plans, step, refittable=True)
    x = np.ones((2, 4), np.float32)
    assert plans.serve(path).execute({"x": x})["y"][0, 0] == 2
    np.savez(path / "weights.npz", k=np.array([3], np.float32))
    instance = plans.serve(path, parameters=Parameters(refit_weights="weights.npz"))
    assert instance.execute({"x": x})["y"][0, 0] == 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"k": np.zeros(2, np.float32)}, "weight 'k' float32[2]: weights k do not match any that can be refitted"),
        ({"j": np.zeros(1, np.float32)}, "weight 'j' float32[1]: weights j do not match any that can be refitted"),
        ({}, "these weights must be given, too: k"),
    ],
)
def test_weights_that_do_not_fit_are_named(plans: Any, step: Any, weights: dict[str, Any], message: str) -> None:
    path = scaled(plans, step, refittable=True)
    np.savez(path / "weights.npz", **weights)
    with pytest.raises(LoadError) as raised:
        plans.serve(path, parameters=Parameters(refit_weights="weights.npz"))
    assert raised.value.message == f"'{path / 'weights.npz'}': {message}"


def test_a_file_of_weights_is_never_unpickled(plans: Any, step: Any) -> None:
    path = scaled(plans, step, refittable=True)
    np.savez(path / "weights.npz", k=np.array([print], object))
    with pytest.raises(LoadError, match=r"weights.npz' is no file of arrays by name \(.npz\)"):
        plans.serve(path, parameters=Parameters(refit_weights="weights.npz"))
    (path / "weights.npz").write_bytes(b"no archive")
    with pytest.raises(LoadError, match=r"weights.npz' is no file of arrays by name \(.npz\)"):
        plans.serve(path, parameters=Parameters(refit_weights="weights.npz"))


def test_the_error_for_a_plan_that_cannot_be_refitted_has_the_flag(plans: Any, step: Any) -> None:
    path = scaled(plans, step)
    np.savez(path / "weights.npz", k=np.array([3], np.float32))
    with pytest.raises(LoadError, match="cannot be refitted: build it with the flag REFIT"):
        plans.serve(path, parameters=Parameters(refit_weights="weights.npz"))


def test_the_budget_of_weights_is_set_where_the_plan_streams_them(plans: Any, step: Any) -> None:
    parameters = Parameters(weight_streaming_budget_bytes=1000)
    instance = plans.serve(scaled(plans, step, streamable=4000), parameters=parameters)
    assert instance._engine._engine.weight_streaming_budget_v2 == 1000
    with pytest.raises(ConfigError, match="the plan has no weights to stream"):
        plans.serve(scaled(plans, step, name="still"), parameters=parameters)
