"""Accelerators: the execution providers and options in a config, and the builds of the engine that have them."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest

from headrace import ConfigError, Device, LoadError
from headrace_onnx import Parameters, providers
from headrace_onnx.session import open_session

AB = """
    max_batch_size: 4
    input [{ name: "A" data_type: TYPE_FP32 dims: 16 }, { name: "B" data_type: TYPE_FP32 dims: 16 }]
    output [{ name: "S" data_type: TYPE_FP32 dims: 16 }]
"""


def accelerated(kind: str, name: str, **parameters: str) -> str:
    entries = "".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    accelerator = f'{kind}_execution_accelerator {{ name: "{name}" {entries} }}'
    return f"{AB} optimization {{ execution_accelerators {{ {accelerator} }} }}"


def test_an_unknown_accelerator_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        graphs.serve(graphs.add(), accelerated("cpu", "abacus"))
    assert caught.value.message == "unknown Execution Accelerator 'abacus' is requested"


def test_an_unknown_gpu_accelerator_is_refused(graphs: Any) -> None:
    model = graphs.model(graphs.add(), accelerated("gpu", "abacus"))
    with pytest.raises(ConfigError, match="unknown Execution Accelerator 'abacus' is requested"):
        providers.choose(onnxruntime, model, Device("gpu"))


@pytest.mark.skipif(providers.OPENVINO in onnxruntime.get_available_providers(), reason="openvino is installed")
def test_the_error_for_a_missing_accelerator_has_the_install_command(graphs: Any) -> None:
    with pytest.raises(LoadError, match=r"needs OpenVINOExecutionProvider.*pip install onnxruntime-openvino"):
        graphs.serve(graphs.add(), accelerated("cpu", "openvino"))


class GpuEngine:
    """An engine that reports the GPU providers."""

    __version__ = "1.31"

    @staticmethod
    def get_available_providers() -> list[str]:
        return [providers.TENSORRT, providers.CUDA, providers.CPU]


def chosen(graphs: Any, config: str, **parameters: Any) -> dict[str, dict[str, str]]:
    model = graphs.model(graphs.add(), config, Parameters(**parameters))
    return dict(providers.choose(GpuEngine, model, Device("gpu", 3)))


def test_cuda_options_pass_through_and_name_the_device(graphs: Any) -> None:
    options = chosen(graphs, accelerated("gpu", "cuda", cudnn_conv_use_max_workspace="0"))[providers.CUDA]
    assert options["cudnn_conv_use_max_workspace"] == "0"
    assert options["device_id"] == "3"


def test_deprecated_cuda_parameters_become_options(graphs: Any) -> None:
    options = chosen(
        graphs,
        AB,
        cudnn_conv_algo_search=1,
        gpu_mem_limit=1 << 30,
        arena_extend_strategy=1,
        do_copy_in_default_stream=False,
    )[providers.CUDA]
    assert options == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": "1073741824",
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": "0",
        "device_id": "3",
    }


def test_the_accelerators_options_win_over_the_deprecated_ones(graphs: Any) -> None:
    config = accelerated("gpu", "cuda", cudnn_conv_algo_search="DEFAULT")
    assert chosen(graphs, config)[providers.CUDA]["cudnn_conv_algo_search"] == "DEFAULT"


@pytest.mark.parametrize(
    ("config", "parameters", "expected"),
    [
        ("max_batch_size: 8", {}, "HEURISTIC"),
        ('input { name: "A" dims: [ -1, 16 ] }', {}, "HEURISTIC"),
        ('max_batch_size: 1 input { name: "A" dims: [ 16 ] }', {}, None),
        ("max_batch_size: 8", {"cudnn_conv_algo_search": 0}, "EXHAUSTIVE"),
        (accelerated("gpu", "cuda", cudnn_conv_algo_search="DEFAULT"), {}, "DEFAULT"),
    ],
)
def test_convolutions_are_chosen_without_trials(
    graphs: Any, config: str, parameters: Any, expected: str | None
) -> None:
    """None: ONNX Runtime's default, EXHAUSTIVE."""
    assert chosen(graphs, config, **parameters)[providers.CUDA].get("cudnn_conv_algo_search") == expected


def test_a_graph_of_one_requests_memory_is_refused(graphs: Any) -> None:
    assert chosen(graphs, accelerated("gpu", "cuda", enable_cuda_graph="0"))
    with pytest.raises(ConfigError, match="parameter 'enable_cuda_graph' of model 'm' is not supported"):
        chosen(graphs, accelerated("gpu", "cuda", enable_cuda_graph="1"))


@pytest.mark.parametrize("key", ["cudnn_conv_algo_search", "arena_extend_strategy"])
def test_a_deprecated_parameter_outside_its_table_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"unsupported {key} value '7' is requested"):
        Parameters(**{key: 7})  # type: ignore[arg-type]


def test_tensorrt_precedes_cuda_and_the_cpu(graphs: Any) -> None:
    config = accelerated(
        "gpu", "tensorrt", precision_mode="FP16", max_workspace_size_bytes="1073741824", trt_engine_cache_enable="1"
    )
    found = chosen(graphs, config)
    assert list(found) == [providers.TENSORRT, providers.CUDA, providers.CPU]
    assert found[providers.TENSORRT] == {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1073741824",
        "trt_engine_cache_enable": "1",
        "device_id": "3",
    }


def test_an_unknown_tensorrt_key_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(graphs, accelerated("gpu", "tensorrt", speed="11"))
    assert caught.value.message == "unknown parameter 'speed' is provided for TensorRT Execution Accelerator"


def test_an_unknown_precision_is_refused(graphs: Any) -> None:
    with pytest.raises(ConfigError, match="unsupported precision mode 'FP4' is requested"):
        chosen(graphs, accelerated("gpu", "tensorrt", precision_mode="FP4"))


def test_a_provider_that_does_not_start_is_a_load_error(graphs: Any) -> None:
    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        """Runs on the CPU, as onnxruntime-gpu does without the CUDA libraries."""

        def __init__(self, path: str, options: Any, chosen: Any, enable_fallback: int) -> None:
            super().__init__(path, options, [providers.CPU])

    class Engine(GpuEngine):
        SessionOptions = onnxruntime.SessionOptions
        GraphOptimizationLevel = onnxruntime.GraphOptimizationLevel
        ExecutionMode = onnxruntime.ExecutionMode
        InferenceSession = Session

    with pytest.raises(LoadError, match="CUDAExecutionProvider could not be started; active are CPUExecutionProvider"):
        open_session(Engine, graphs.model(graphs.add(), AB), Device("gpu"), {})


class CpuEngine:
    __version__ = "1.31"

    @staticmethod
    def get_available_providers() -> list[str]:
        return [providers.CPU]


def test_a_configured_gpu_is_not_replaced_by_the_cpu(graphs: Any) -> None:
    model = graphs.model(graphs.add(), AB + "instance_group { kind: KIND_GPU }", device=Device("gpu", 0))
    with pytest.raises(LoadError, match=r"needs CUDAExecutionProvider.*pip install onnxruntime-gpu"):
        providers.device_of(CpuEngine, model)


def test_kind_auto_is_the_cpu_if_the_engine_has_no_gpu(graphs: Any) -> None:
    model = graphs.model(graphs.add(), AB + "instance_group { kind: KIND_AUTO }", device=Device("gpu", 0))
    assert providers.device_of(CpuEngine, model) == Device("cpu")
    assert providers.device_of(GpuEngine, model) == Device("gpu", 0)


#: Keys of docs/spec/behaviours.md section 10.2, and ONNX Runtime's names of them.
TENSORRT = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
} | {
    f"trt_{key}": f"trt_{key}"
    for key in [
        "max_partition_iterations",
        "min_subgraph_size",
        "dla_enable",
        "dla_core",
        "engine_cache_enable",
        "engine_cache_prefix",
        "dump_subgraphs",
        "force_sequential_engine_build",
        "context_memory_sharing_enable",
        "layer_norm_fp32_fallback",
        "timing_cache_enable",
        "force_timing_cache",
        "detailed_build_log",
        "build_heuristics_enable",
        "sparsity_enable",
        "builder_optimization_level",
        "auxiliary_streams",
        "tactic_sources",
        "profile_min_shapes",
        "profile_max_shapes",
        "profile_opt_shapes",
        "cuda_graph_enable",
        "dump_ep_context_model",
        "ep_context_embed_mode",
    ]
}
TENSORRT_FILES = ("engine_cache_path", "timing_cache_path", "extra_plugin_lib_paths", "ep_context_file_path")


@pytest.mark.parametrize("key", TENSORRT)
def test_a_key_of_tensorrt_is_passed_on(graphs: Any, key: str) -> None:
    found = chosen(graphs, accelerated("gpu", "tensorrt", **{key: "2"}))[providers.TENSORRT]
    assert found == {TENSORRT[key]: "2", "device_id": "3"}


@pytest.mark.parametrize("key", TENSORRT_FILES)
def test_a_key_of_tensorrt_that_names_files_is_passed_on_with_its_place(graphs: Any, key: str) -> None:
    found = chosen(graphs, accelerated("gpu", "tensorrt", **{f"trt_{key}": "here"}))[providers.TENSORRT]
    assert found == {f"trt_{key}": str(graphs.root / "m" / "1" / "here"), "device_id": "3"}


@pytest.mark.parametrize(
    ("mode", "flags"),
    [("FP32", {}), *((each, {f"trt_{each.lower()}_enable": "1"}) for each in ("FP16", "BF16", "INT8"))],
)
def test_a_precision_of_tensorrt_is_a_flag(graphs: Any, mode: str, flags: dict[str, str]) -> None:
    found = chosen(graphs, accelerated("gpu", "tensorrt", precision_mode=mode))[providers.TENSORRT]
    assert found == {**flags, "device_id": "3"}


class EveryEngine:
    """An engine that reports every provider."""

    __version__ = "1.31"

    @staticmethod
    def get_available_providers() -> list[str]:
        return [providers.OPENVINO, providers.XNNPACK, providers.COREML, providers.DIRECTML, providers.CPU]


@pytest.mark.parametrize(
    ("name", "provider", "key", "value"),
    [
        ("openvino", providers.OPENVINO, "num_of_threads", "2"),
        ("xnnpack", providers.XNNPACK, "intra_op_num_threads", "2"),
        ("coreml", providers.COREML, "MLComputeUnits", "CPUOnly"),
        ("directml", providers.DIRECTML, "device_id", "1"),
    ],
)
def test_other_accelerators_precede_the_cpu(graphs: Any, name: str, provider: str, key: str, value: str) -> None:
    model = graphs.model(graphs.add(), accelerated("cpu", name, **{key: value}))
    (first, options), (last, _) = providers.choose(EveryEngine, model, Device("cpu"))
    assert (first, last, options[key]) == (provider, providers.CPU, value)
    with pytest.raises(ConfigError, match=r"unknown parameter 'spede' is provided for .* Execution Accelerator"):
        providers.choose(EveryEngine, graphs.model(graphs.add(), accelerated("cpu", name, spede="1")), Device("cpu"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("openvino", "run: pip install onnxruntime-openvino"),
        ("xnnpack", "no wheel of PyPI has it: build onnxruntime with --use_xnnpack"),
        ("coreml", "the wheels of onnxruntime for macOS have it"),
        ("directml", "the wheel onnxruntime-directml, for Windows, has it"),
    ],
)
def test_the_error_for_a_missing_accelerator_names_the_build_that_has_it(graphs: Any, name: str, hint: str) -> None:
    model = graphs.model(graphs.add(), accelerated("cpu", name))
    with pytest.raises(LoadError) as caught:
        providers.choose(CpuEngine, model, Device("cpu"))
    assert caught.value.message.endswith(f"but onnxruntime 1.31 offers only CPUExecutionProvider; {hint}")


@pytest.mark.parametrize(
    ("kind", "name", "key"), [("gpu", "tensorrt", "trt_extra_plugin_lib_paths"), ("cpu", "openvino", "load_config")]
)
def test_a_load_request_may_not_set_options_for_code_or_files(graphs: Any, kind: str, name: str, key: str) -> None:
    config = accelerated(kind, name, **{key: "here"})
    for engine in (GpuEngine, EveryEngine):
        device = Device("gpu", 0) if kind == "gpu" else Device("cpu")
        if (engine is GpuEngine) is (kind == "gpu"):
            providers.choose(engine, graphs.model(graphs.add(), config), device)
            with pytest.raises(ConfigError, match=f"'{key}' of model 'm' came with a load request"):
                providers.choose(engine, graphs.model(graphs.add(), config, is_sent=True), device)


def test_accelerators_of_gpus_are_ignored_on_the_cpu(graphs: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    graphs.serve(graphs.add(), text)
    assert "model 'm': GPU Execution Accelerator will be ignored for model instance on CPU" in caplog.text
