"""No graph and no config makes the engine read or write a file outside the model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace import ConfigError, Device, LoadError
from headrace_onnx import Parameters, providers
from headrace_onnx.parameters import COREML, CUDA, DIRECTML, OPENVINO, SESSION, XNNPACK
from headrace_testing.serving import serve

COMPLETE = """input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }
    output { name: "y" data_type: TYPE_FP32 dims: [-1, 4] }"""
IO: tuple[int, list[Any]] = (TensorProto.FLOAT, ["n", 4])


def outside(location: str) -> TensorProto:
    """Weights that lie in the file ``location``."""
    tensor = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def constant(location: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["W"], value=outside(location))


def in_initializer(location: str) -> onnx.ModelProto:
    return graph([helper.make_node("Add", ["x", "W"], ["y"])], [outside(location)])


def in_attribute(location: str) -> onnx.ModelProto:
    return graph([constant(location), helper.make_node("Add", ["x", "W"], ["y"])])


def in_branch(location: str) -> onnx.ModelProto:
    branch = helper.make_graph(
        [constant(location)], "b", [], [helper.make_tensor_value_info("W", TensorProto.FLOAT, [4])]
    )
    nodes = [
        helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["c"], ["W2"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["x", "W2"], ["y"]),
    ]
    return graph(nodes)


def in_initializer_of_branch(location: str) -> onnx.ModelProto:
    model = in_branch(location)
    for attribute in model.graph.node[1].attribute:
        attribute.g.ClearField("node")
        attribute.g.node.append(helper.make_node("Identity", ["V"], ["W"]))
        attribute.g.initializer.append(outside(location))
        attribute.g.initializer[0].name = "V"
    return model


def in_function(location: str) -> onnx.ModelProto:
    model = graph([helper.make_node("Mine", ["x"], ["y"], domain="mine")])
    nodes = [constant(location), helper.make_node("Add", ["a", "W"], ["b"])]
    model.functions.append(helper.make_function("mine", "Mine", ["a"], ["b"], nodes, [helper.make_opsetid("", 21)]))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    return model


def in_sparse_initializer(location: str) -> onnx.ModelProto:
    model = graph([helper.make_node("Add", ["x", "W"], ["y"])])
    model.graph.sparse_initializer.add(values=outside(location), dims=[4])
    return model


def in_a_second_graph(location: str) -> onnx.ModelProto:
    """A field may be twice in a file; a reader merges both."""
    model = graph([helper.make_node("Add", ["x", "x"], ["y"])])
    other = in_initializer(location)
    return onnx.ModelProto.FromString(model.SerializeToString() + other.SerializeToString())


def compiled(location: str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context=location, **attributes)
    return graph([node])


def graph(nodes: list[onnx.NodeProto], initializers: list[TensorProto] | None = None) -> onnx.ModelProto:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", *IO)],
        [helper.make_tensor_value_info("y", *IO)],
        initializers or [],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def write(graphs: Any, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    version: Path = graphs.root / "m" / "1"
    (version / name).parent.mkdir(parents=True, exist_ok=True)
    (version / name).write_bytes(model.SerializeToString())
    return version


@pytest.mark.parametrize(
    "make",
    [
        in_initializer,
        in_attribute,
        in_branch,
        in_initializer_of_branch,
        in_function,
        in_sparse_initializer,
        in_a_second_graph,
    ],
)
@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/etc/passwd", "it is absolute"),
        ("../../secret", "it climbs out with '..'"),
        ("a/../../../secret", "it climbs out with '..'"),
        ("folder/../../w", "it goes up again with '..'"),
        ("*/_ORT_MEM_ADDR_/*", "it is an address in memory"),
        ("..\\secret", "it contains a backslash"),
    ],
)
def test_weights_outside_of_the_model_are_always_refused(graphs: Any, make: Any, location: str, reason: str) -> None:
    version = write(graphs, make(location))
    with pytest.raises(LoadError) as refusal:
        graphs.serve(version)
    assert refusal.value.message == (
        f"'{version / 'model.onnx'}' names the file '{location}', which must stay in the model directory: {reason}"
    )


@pytest.mark.parametrize("config", ["", COMPLETE])
def test_a_graph_above_its_version_names_files_from_there(graphs: Any, config: str) -> None:
    version = write(graphs, in_initializer("../weights.bin"), "../model.onnx")
    (graphs.root / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    with pytest.raises(LoadError, match=r"names the file '\.\./weights\.bin', .*: it climbs out with '\.\.'"):
        graphs.serve(version, f'default_model_filename: "../model.onnx" {config}')


def test_weights_beside_the_graph_are_read(graphs: Any) -> None:
    version = write(graphs, in_initializer("w/weights.bin"))
    (version / "w").mkdir()
    (version / "w" / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    y = graphs.serve(version).execute({"x": np.ones((1, 4), np.float32)})["y"]
    assert y.tolist() == [[1, 2, 3, 4]]


def test_compiled_files_outside_of_the_model_are_refused(graphs: Any) -> None:
    version = write(graphs, compiled("/etc/passwd", embed_mode=0))
    with pytest.raises(LoadError, match=r"names the file '/etc/passwd', .*: it is absolute"):
        graphs.serve(version)


@pytest.mark.parametrize(
    "key",
    [
        "session.model_external_initializers_file_folder_path",
        "session.optimized_model_filepath",
        "session.optimized_model_external_initializers_file_name",
        "session.collect_node_memory_stats_to_file",
        "session.node_partition_config_file",
        "session.moe_expert_counter_state_file",
        "session.enable_profiling",
        "session.what_comes_next",
    ],
)
def test_session_entries_that_name_files_or_are_not_known_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter '{key}' is not passed on to ONNX Runtime") as refusal:
        Parameters(session={key: "/etc"})
    assert refusal.value.field == f"parameters['{key}']"


def test_a_misspelt_session_entry_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'session\.disable_prepacking'\?"):
        Parameters(session={"session.disable_prepack": "1"})


def test_nothing_that_is_passed_on_names_a_file_or_an_address() -> None:
    """``cache_dir``, ``load_config`` and ``ModelCacheDirectory`` are placed in the model's directory."""
    suspicious = ("file", "path", "_dir", "directory", "folder", "stream", "context", "external", "alloc", "config")
    passed = SESSION | CUDA | OPENVINO | XNNPACK | COREML | DIRECTML
    named = {name for name in passed if any(word in name.lower() for word in suspicious)}
    assert named == {
        "ModelCacheDirectory",
        "ProfileComputePlan",
        "cache_dir",
        "load_config",
        "do_copy_in_default_stream",
        "use_ep_level_unified_stream",
        "num_streams",
        "session.use_ort_model_bytes_directly",
        "session.use_env_allocators",
        "session.use_device_allocator_for_initializers",
    }


class EveryEngine:
    """An engine that reports every provider."""

    __version__ = "1.31"

    @staticmethod
    def get_available_providers() -> list[str]:
        return [providers.TENSORRT, providers.CUDA, providers.OPENVINO, providers.COREML, providers.CPU]


def options(graphs: Any, name: str, key: str, value: str) -> dict[str, str]:
    """Return the options that the provider of the accelerator ``name`` gets."""
    kind = "gpu" if name in ("tensorrt", "cuda") else "cpu"
    config = (
        f'optimization {{ execution_accelerators {{ {kind}_execution_accelerator {{ name: "{name}" '
        f'parameters {{ key: "{key}" value: {value!r} }} }} }} }}'
    )
    device = Device("cpu") if kind == "cpu" else Device("gpu", 0)
    provider = {
        "openvino": providers.OPENVINO,
        "coreml": providers.COREML,
        "tensorrt": providers.TENSORRT,
        "cuda": providers.CUDA,
    }[name]
    chosen: dict[str, dict[str, str]] = dict(providers.choose(EveryEngine, graphs.model(graphs.add(), config), device))
    return chosen[provider]


FILES = [
    ("tensorrt", "trt_engine_cache_path"),
    ("tensorrt", "trt_timing_cache_path"),
    ("tensorrt", "trt_ep_context_file_path"),
    ("tensorrt", "trt_extra_plugin_lib_paths"),
    ("openvino", "cache_dir"),
    ("openvino", "load_config"),
    ("coreml", "ModelCacheDirectory"),
]


@pytest.mark.parametrize(("name", "key"), FILES)
def test_paths_of_an_accelerator_stay_in_the_model(graphs: Any, name: str, key: str) -> None:
    model = graphs.root / "m"
    assert options(graphs, name, key, "cache")[key] == str(model / "1" / "cache")
    assert options(graphs, name, key, "../cache")[key] == str(model / "cache")
    assert options(graphs, name, key, str(model / "2" / "cache"))[key] == str(model / "2" / "cache")
    for value in ("/tmp", "../../other", f"{model}/../other", f"{model}-other/x"):
        with pytest.raises(ConfigError, match=f"parameter '{key}' of model 'm' is '{value}', which must stay in"):
            options(graphs, name, key, value)


def test_one_library_of_many_is_enough_to_refuse_them(graphs: Any) -> None:
    with pytest.raises(ConfigError, match=r"'/tmp/b\.so', which must stay"):
        options(graphs, "tensorrt", "trt_extra_plugin_lib_paths", "a.so;/tmp/b.so")


@pytest.mark.parametrize("key", ["trt_engine_cache_prefix", "int8_calibration_table_name"])
def test_a_part_of_a_file_s_name_does_not_climb_out(graphs: Any, key: str) -> None:
    assert "gpu" in options(graphs, "tensorrt", key, "gpu").values()
    with pytest.raises(ConfigError, match="climbs out"):
        options(graphs, "tensorrt", key, "../../../x")


def test_settings_in_json_are_no_path(graphs: Any) -> None:
    assert options(graphs, "openvino", "load_config", '{"CPU": {}}')["load_config"] == '{"CPU": {}}'


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cuda", "user_compute_stream"),
        ("cuda", "has_user_compute_stream"),
        ("cuda", "gpu_external_alloc"),
        ("openvino", "context"),
        ("tensorrt", "trt_onnx_model_folder_path"),
        ("tensorrt", "trt_engine_decryption_lib_path"),
    ],
)
def test_an_option_that_holds_an_address_or_is_not_known_is_refused(graphs: Any, name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown parameter '{key}' is provided for"):
        options(graphs, name, key, "4096")


@pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 31), reason="before 1.31 ONNX Runtime maps weights"
)
@pytest.mark.parametrize("make", [in_initializer, in_attribute, in_initializer_of_branch])
@pytest.mark.parametrize("location", ["weights.bin", "./w//weights.bin"])
def test_weights_that_are_shortened_while_they_are_served_end_nothing(graphs: Any, make: Any, location: str) -> None:
    """The engine would map the file. It runs in a process, which a broken guard would crash instead of the tests."""
    model = make(location)
    version = write(graphs, model)
    (version.parent / "config.pbtxt").write_text(
        'parameters { key: "isolation" value { string_value: "process" } } instance_group { count: 1 kind: KIND_CPU }'
    )
    file = version / location
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    with serve(graphs.root) as server:
        file.write_bytes(b"")
        y = server.infer("m", {"x": np.ones((1, 4), np.float32)}).outputs["y"]
    np.testing.assert_array_equal(y, [[1, 2, 3, 4]])


@pytest.mark.parametrize("content", [b"", b"short", None])
@pytest.mark.parametrize("make", [in_initializer, in_branch])
@pytest.mark.parametrize("config", ["", COMPLETE])
def test_weights_that_are_too_few_are_refused(graphs: Any, make: Any, content: bytes | None, config: str) -> None:
    version = write(graphs, make("weights.bin"))
    if content is not None:
        (version / "weights.bin").write_bytes(content)
    with pytest.raises(LoadError, match=r"unable to load model 'm': .*(weights\.bin|model\.onnx)"):
        graphs.serve(version, config)
