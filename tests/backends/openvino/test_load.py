"""Loads of OpenVINO models that are refused, and the effects of their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import Model, ModelConfig, ModelInstanceGroup
from headrace_openvino import OpenVino, Parameters
from headrace_openvino.compiled_model import compile_model
from headrace_testing.serving import serve

openvino = pytest.importorskip("openvino")
opset = pytest.importorskip("openvino.opset13")


def reason(models: Any) -> str:
    with serve(models.root, exit_on_error=False) as server:
        return next(entry.reason for entry in server.index() if entry.name == "m")


def ones(rows: int) -> dict[str, Any]:
    return {"A": np.ones((rows, 16), np.float32), "B": np.ones((rows, 16), np.float32)}


@pytest.mark.parametrize("file", ["model.xml", "model.bin"])
def test_a_file_that_is_not_there_is_named(models: Any, file: str) -> None:
    (models.add() / file).unlink()
    models.config('backend: "openvino"')
    assert f"m/1/{file}" in reason(models)


def test_text_that_is_no_graph_is_named(models: Any) -> None:
    (models.add() / "model.xml").write_text("<net")
    assert "m/1/model.xml" in reason(models)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("TARGET_DEVICE", "FOO", "on device 'FOO'"),
        ("PERFORMANCE_HINT", "FAST", "must be LATENCY or THROUGHPUT, got 'FAST'"),
        ("NUM_STREAMS", "some", "must be a number above 0, AUTO or NUMA, got 'some'"),
        ("INFERENCE_NUM_THREADS", "-1", "must be 0 or more, got -1"),
        ("COMPILATION_NUM_THREADS", "1", "is for other devices"),
        ("CPU_EXTENSION_PATH", "../../../libother.so", "libother.so"),
        ("CPU_EXTENSION_PATH", "model.bin", "m/1/model.bin"),
    ],
)
def test_an_unsupported_parameter_is_refused(models: Any, key: str, value: str, message: str) -> None:
    models.add()
    models.parameter(key, value)
    assert message in reason(models)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("PERFORMANCE_HINT", "THROUGHPUT"),
        ("NUM_STREAMS", "AUTO"),
        ("NUM_STREAMS", "2"),
        ("INFERENCE_NUM_THREADS", "1"),
        ("HINT_BF16", "YES"),
        ("SKIP_OV_DYNAMIC_BATCHSIZE", "YES"),
        ("SKIP_OV_DYNAMIC_BATCHSIZE", "NO"),
    ],
)
def test_a_parameter_is_taken(models: Any, key: str, value: str) -> None:
    models.add()
    models.parameter(key, value)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", ones(2)).outputs["S"], np.full((2, 16), 2))


def test_a_tensor_may_be_called_by_any_of_its_names(models: Any) -> None:
    x = opset.parameter([-1, 2], openvino.Type.f32)
    x.output(0).set_names({"one", "two"})
    version = models.root / "m" / "1"
    version.mkdir(parents=True)
    y = opset.negative(x)
    y.output(0).set_names({"y", "z"})
    network = openvino.Model([y], [x], "network")
    openvino.save_model(network, str(version / "model.xml"), compress_to_fp16=False)
    array = np.array([[1, 2]], np.float32)
    for name, output in (("one", "z"), ("two", "y")):
        models.config(f"""max_batch_size: 2 input {{ name: "{name}" data_type: TYPE_FP32 dims: [2] }}
            output {{ name: "{output}" data_type: TYPE_FP32 dims: [2] }}""")
        with serve(models.root) as server:
            np.testing.assert_array_equal(server.infer("m", {name: array}).outputs[output], -array)


@pytest.mark.parametrize("count", [1, 2])
def test_instances_share_a_compiled_model_with_a_stream_for_each(tmp_path: Any, models: Any, count: int) -> None:
    from google.protobuf import text_format

    config = text_format.Parse(f'name: "m" instance_group {{ count: {count} kind: KIND_CPU }}', ModelConfig())
    backend = OpenVino({})
    model = Model("m", 1, models.add(), config, Parameters(), backend.share(None))  # type: ignore[arg-type]
    backend.complete_config(model)
    instances = [backend.load(model) for _ in range(count)]
    (compiled,) = model.shared.made.values()
    assert compiled.compiled.get_property("NUM_STREAMS") == count
    assert [instance.any_thread for instance in instances] == [count == 1] * count


@pytest.mark.parametrize(
    ("count", "parameters", "isolation", "concurrency"),
    [
        (1, Parameters(), "thread", 1),
        (1, Parameters(performance_hint="LATENCY"), "thread", 1),
        (1, Parameters(num_streams="2", inference_num_threads=2), "thread", 2),
        (3, Parameters(num_streams="2", inference_num_threads=2), "thread", 1),
        (2, Parameters(num_streams="2", inference_num_threads=2), "process", 2),
    ],
)
def test_instances_divide_the_streams(
    models: Any, count: int, parameters: Parameters, isolation: str, concurrency: int
) -> None:
    config = ModelConfig(name="m")
    config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)
    config.parameters["isolation"].string_value = isolation
    backend = OpenVino({})
    model = Model("m", 1, models.add(), config, parameters, backend.share(None))  # type: ignore[arg-type]
    backend.complete_config(model)
    assert backend.load(model).concurrency == concurrency


@pytest.mark.parametrize("hint", [False, True])
def test_the_cpu_computes_in_fp32_by_default(models: Any, hint: bool) -> None:
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if hint and "BF16" in capabilities else "f32"
    model = Model("m", 1, models.add(), ModelConfig(name="m"), Parameters(hint_bf16=hint))
    assert compile_model(model).compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == precision


def test_all_streams_together_have_the_cores_of_the_server(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = models.add()
    for cores in (1, 2):
        monkeypatch.setattr("headrace_openvino.compiled_model.available_cores", lambda cores=cores: cores)
        compiled = compile_model(Model("m", 1, version, ModelConfig(name="m"), Parameters())).compiled
        assert compiled.get_property("INFERENCE_NUM_THREADS") == cores


def test_instances_in_processes_divide_the_cores(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = models.add()
    monkeypatch.setattr("headrace_engines.instance_threads.available_cores", lambda: 4)
    for count, threads in ((2, 2), (4, 1)):
        config = ModelConfig(name="m")
        config.instance_group.add(count=count, kind=ModelInstanceGroup.KIND_CPU)
        config.parameters["isolation"].string_value = "process"
        compiled = compile_model(Model("m", 1, version, config, Parameters())).compiled
        assert (compiled.get_property("NUM_STREAMS"), compiled.get_property("INFERENCE_NUM_THREADS")) == (1, threads)


def test_inputs_that_lie_in_memory_with_gaps_are_copied(models: Any) -> None:
    models.add()
    wide = np.random.default_rng(5).normal(size=(16, 6)).astype(np.float32)
    a, b = wide[:, ::2].T, wide[:, 1::2].T
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"A": a, "B": b}).outputs["S"], a + b)


def test_of_several_names_of_a_port_the_one_that_a_sequence_uses_is_taken(models: Any) -> None:
    """Each port has two names; the config uses the second for state and control."""
    pytest.importorskip("headrace_sequence")
    names = {"x": "z_x", "before": "z_before", "start": "z_start", "y": "z_y", "after": "z_after"}
    io = {each: (openvino.Type.f32, [-1, 1]) for each in ("x", "before", "start")}

    def add(x: Any, before: Any, start: Any) -> dict[str, Any]:
        total = opset.add(x, opset.multiply(before, opset.subtract(opset.constant(np.float32(1)), start)))
        return {"y": opset.multiply(total, opset.constant(np.float32(2))), "after": total}

    path = models.save(add, io) / "model.xml"
    text = path.read_text()
    for name, other in names.items():
        text = text.replace(f'names="{name}"', f'names="{name},{other}"')
    path.write_text(text)
    models.config("""max_batch_size: 4
        input { name: "z_x" data_type: TYPE_FP32 dims: [1] }
        output { name: "z_y" data_type: TYPE_FP32 dims: [1] }
        sequence_batching {
          control_input { name: "z_start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
          state { input_name: "z_before" output_name: "z_after" data_type: TYPE_FP32 dims: [1] } }
        """)
    with serve(models.root) as server:
        found = [
            np.asarray(
                server.infer(
                    "m", {"z_x": np.array([[value]], np.float32)}, sequence_id=7, sequence_start=value == 1
                ).outputs["z_y"]
            ).item()
            for value in (1, 2, 4)
        ]
    assert found == [2, 6, 14]


def repeated(count: Any, x: Any) -> Any:
    """``y = x + count``, by adding 1 as often."""
    inner = opset.parameter([2], openvino.Type.f32)
    more = opset.add(inner, opset.constant(np.ones(1, np.float32)))
    go_on = opset.constant(np.array([True]))
    loop = opset.loop(count.output(0), opset.constant(np.array([True])).output(0))
    loop.set_function(openvino.Model([more, go_on], [inner], "body"))
    loop.set_special_body_ports([-1, 1])
    loop.set_merged_input(inner, x.output(0), more.output(0))
    return loop.get_iter_value(more.output(0), -1)


def test_a_model_that_may_never_end_does_not_run_on_the_event_loop(models: Any) -> None:
    def network(count: Any, x: Any) -> dict[str, Any]:
        return {"y": opset.relu(repeated(count, x))}

    path = models.save(network, {"count": (openvino.Type.i32, [1]), "x": (openvino.Type.f32, [2])})
    backend = OpenVino({})
    model = Model("m", 1, path, ModelConfig(name="m"), Parameters(), backend.share(None))  # type: ignore[arg-type]
    backend.complete_config(model)
    instance = backend.load(model)
    assert not instance.any_thread
    found = instance.execute({"count": np.array([3], np.int32), "x": np.zeros(2, np.float32)})["y"]
    np.testing.assert_array_equal(found, [3, 3])


def test_nor_are_branches_in_which_that_may_be(models: Any) -> None:
    def network(which: Any, x: Any) -> dict[str, Any]:
        choice = opset.if_op(which.output(0))
        bodies = []
        for sign in (1, -1):
            parameter = opset.parameter([2], openvino.Type.f32)
            bodies.append(
                (parameter, opset.result(opset.multiply(parameter, opset.constant(np.full(1, sign, np.float32)))))
            )
        choice.set_then_body(openvino.Model([bodies[0][1]], [bodies[0][0]], "then"))
        choice.set_else_body(openvino.Model([bodies[1][1]], [bodies[1][0]], "else"))
        choice.set_input(x.output(0), bodies[0][0], bodies[1][0])
        return {"y": opset.relu(choice.set_output(bodies[0][1], bodies[1][1]))}

    path = models.save(network, {"which": (openvino.Type.boolean, [1]), "x": (openvino.Type.f32, [2])})
    backend = OpenVino({})
    model = Model("m", 1, path, ModelConfig(name="m"), Parameters(), backend.share(None))  # type: ignore[arg-type]
    backend.complete_config(model)
    assert not backend.load(model).any_thread
