"""Files, threads, accelerators and broken models."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace import Code, ConfigError, Device, LoadError
from headrace_onnx import OnnxRuntime, Parameters, session
from headrace_onnx.session import open_session

AB = """
    max_batch_size: 4
    input [{ name: "A" data_type: TYPE_FP32 dims: 16 }, { name: "B" data_type: TYPE_FP32 dims: 16 }]
    output [{ name: "S" data_type: TYPE_FP32 dims: 16 }]
"""


def options_of(graphs: Any, config: str = "", **parameters: Any) -> Any:
    """The session options that ONNX Runtime got."""
    model = graphs.model(graphs.add(), AB + config, Parameters(**parameters))
    return open_session(onnxruntime, model, Device("cpu"), {}).session.get_session_options()


# ---------------------------------------------------------------------------- files


def with_external_data(path: Path) -> np.ndarray[Any, Any]:
    """A model ``y = x + W`` at ``path``, with W in ``weights.bin`` beside it. Return W."""
    weights = np.arange(1024, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "W"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1024])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1024])],
        [numpy_helper.from_array(weights, "W")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return weights


@pytest.mark.parametrize("relative", ["model.onnx", "model.onnx/model.onnx"])
def test_external_data_is_found_in_both_places(graphs: Any, relative: str) -> None:
    version = graphs.root / "m" / "1"
    weights = with_external_data(version / relative)
    y = graphs.serve(version).execute({"x": np.ones((1, 1024), np.float32)})["y"]
    np.testing.assert_array_equal(y[0], weights + 1)


def test_a_directory_without_a_model_is_named(graphs: Any) -> None:
    directory = graphs.root / "m" / "1" / "model.onnx"
    directory.mkdir(parents=True)
    with pytest.raises(LoadError, match=f"no file '{directory / 'model.onnx'}'"):
        graphs.serve(directory.parent)


def test_the_config_can_name_another_file(graphs: Any) -> None:
    path = graphs.add()
    (path / "model.onnx").rename(path / "net.onnx")
    graphs.serve(path, 'default_model_filename: "net.onnx"')


@pytest.mark.parametrize("content", [b"", b"no model at all", None])
@pytest.mark.parametrize("config", ["", AB])
def test_a_broken_file_is_a_load_error_that_names_it(graphs: Any, content: bytes | None, config: str) -> None:
    path = graphs.add()
    file = path / "model.onnx"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(LoadError, match=r"onnx runtime error \d+: ") as caught:
        graphs.serve(path, config)
    assert caught.value.message.count(str(file)) == 1
    assert caught.value.code is Code.INTERNAL
    assert "\n" not in caught.value.message


def test_build_paths_are_removed_from_errors() -> None:
    """The form of version 1.23: no space before its source file."""
    message = (
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Load model from m failed:/src/graph/model.cc:149 f() No graph."
    )
    assert session.reword(RuntimeError(message)) == "onnx runtime error 2: Load model from m failed:f() No graph."


def test_an_unknown_operator_is_named(graphs: Any) -> None:
    io = (TensorProto.FLOAT, ["n"])
    with pytest.raises(LoadError, match="No Op registered for Nonesuch"):
        graphs.serve(graphs.write([helper.make_node("Nonesuch", ["x"], ["y"])], {"x": io}, {"y": io}))


def test_the_error_for_a_missing_engine_has_the_install_command(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_engine(name: str, *rest: Any) -> Any:
        if name == "onnxruntime":
            raise ModuleNotFoundError("No module named 'onnxruntime'", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_engine)
    with pytest.raises(LoadError, match="pip install onnxruntime"):
        OnnxRuntime({}).complete_config(graphs.model(graphs.add()))


def test_a_missing_operator_library_is_named(graphs: Any) -> None:
    with pytest.raises(LoadError, match=r"libops\.so"):
        graphs.serve(graphs.add(), AB + 'model_operations { op_library_filename: "libops.so" }')


def test_an_operator_library_outside_the_model_is_refused(graphs: Any) -> None:
    path = graphs.add()
    library = path.parents[1] / "libops.so"
    library.write_bytes(b"no library")
    with pytest.raises(LoadError, match="outside the model directory"):
        graphs.serve(path, AB + f'model_operations {{ op_library_filename: "{library}" }}')


def test_an_operator_library_is_found_in_the_version_or_in_the_model(graphs: Any) -> None:
    path = graphs.add()
    for place in (path, path.parent):
        library = place / "libops.so"
        library.write_bytes(b"no library")
        with pytest.raises(LoadError, match="onnx runtime error") as caught:
            graphs.serve(path, AB + 'model_operations { op_library_filename: "libops.so" }')
        assert "libops.so" in caught.value.message
        library.unlink()


# ---------------------------------------------------------------------------- session options


@pytest.mark.parametrize(
    ("level", "expected"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_the_graph_level_chooses_the_optimisation(graphs: Any, level: int, expected: str) -> None:
    options = options_of(graphs, f"optimization {{ graph {{ level: {level} }} }}")
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, expected)


def test_graphs_are_fully_optimised_by_default(graphs: Any) -> None:
    assert options_of(graphs).graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def test_parameters_reach_the_session(graphs: Any) -> None:
    options = options_of(
        graphs,
        intra_op_thread_count=3,
        inter_op_thread_count=2,
        execution_mode=1,
        enable_mem_arena=False,
        enable_mem_pattern=False,
        session={"session.intra_op.allow_spinning": "0"},
    )
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.enable_cpu_mem_arena is False
    assert options.enable_mem_pattern is False
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(("config", "parameters", "threads"), [
    ("", {}, 4), ("instance_group { kind: KIND_CPU count: 4 }", {}, 2),
    ("instance_group { kind: KIND_CPU count: 4 }", {"intra_op_thread_count": 3}, 3),
])  # fmt: skip
def test_the_log_has_the_thread_count_of_an_instance(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    config: str, parameters: dict[str, int], threads: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("headrace_engines.instance_threads.available_cores", lambda: 8)
    with caplog.at_level("INFO", "headrace.onnxruntime"):
        assert options_of(graphs, config, **parameters).intra_op_num_threads == threads
    assert [record.getMessage().rsplit(": ", 1)[1] for record in caplog.records] == [
        f"{threads} threads within an operator"
    ]


def test_an_execution_mode_other_than_0_and_1_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Parameters(execution_mode=2)
    assert caught.value.message == (
        "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 ."
    )


def test_the_arena_can_be_shrunk_after_every_run(graphs: Any, pair: Any) -> None:
    instance = graphs.serve(graphs.add(), parameters=Parameters(arena_shrinkage="cpu:0"))
    key = "memory.enable_memory_arena_shrinkage"
    assert instance._options.get_run_config_entry(key) == "cpu:0"
    np.testing.assert_array_equal(instance.execute({"A": pair[0], "B": pair[1]})["S"], pair[0] + pair[1])


GLOBAL_POOL = """
import sys, threading
import numpy as np
from pathlib import Path
from google.protobuf import text_format
from headrace import Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_onnx import OnnxRuntime, Parameters
path = Path(sys.argv[1])
backend = OnnxRuntime({"enable-global-threadpool": "1", "intra_op_thread_count": "2", "inter_op_thread_count": "1"})
threads = []
for number in range(3):
    model = Model("m", 1, path, ModelConfig(name="m"), Parameters(), backend.share(None))
    backend.complete_config(model)
    instance = backend.load(model)
    ones = np.ones((1, 16), np.float32)
    assert (instance.execute({"A": ones, "B": ones})["S"] == 2).all()
    threads.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
print(len(set(threads)))
"""


def test_with_the_global_pool_more_models_make_no_more_threads(graphs: Any) -> None:
    arguments = [sys.executable, "-c", GLOBAL_POOL, str(graphs.add())]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_an_engine_without_a_global_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldEngine:
        __version__ = "1.9"

    monkeypatch.setattr(session, "_pool_sizes", None)
    with pytest.raises(ConfigError, match=r"newer onnxruntime than 1\.9"):
        session.share_threads(OldEngine(), {"enable-global-threadpool": "1"})


def test_without_the_option_there_is_no_global_pool() -> None:
    assert session.share_threads(onnxruntime, {}) is False
    assert session.share_threads(onnxruntime, {"enable-global-threadpool": "0"}) is False
    for text in ("5", "-1", "maybe"):
        with pytest.raises(ConfigError, match=f"enable-global-threadpool of 'onnxruntime' must be .*, got '{text}'"):
            session.share_threads(onnxruntime, {"enable-global-threadpool": text})


def test_the_engine_does_not_fall_back_to_other_settings(graphs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    affinities = {"session.intra_op_thread_affinities": "no processors"}
    with pytest.raises(LoadError, match="onnx runtime error"):
        options_of(graphs, intra_op_thread_count=2, session=affinities)
    assert "Falling back" not in capfd.readouterr().out
