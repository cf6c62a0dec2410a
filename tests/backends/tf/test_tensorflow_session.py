"""The settings of a session, checked by TensorFlow's own types and by their effect on the process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, Device, LoadError, available_cores
from headrace_testing.serving import serve
from headrace_tf import Parameters, TensorFlow, tensorflow_process
from headrace_tf.parameters import BackendOptions
from headrace_tf.session_config import session_config

tf = pytest.importorskip("tensorflow")


def session_options(
    models: Any, config: str = "", options: Mapping[str, str] | None = None, device: str = "cpu", **parameters: Any
) -> Any:
    """Return the ``ConfigProto`` of a session."""
    path = models.root / "m/1" if (models.root / "m/1").exists() else models.add()
    model = replace(models.model(path, config, Parameters(**parameters)), device=Device(device))  # type: ignore[arg-type]
    return session_config(tf, model, BackendOptions.read(options or {}))


# ---------------------------------------------------------------------- options of the backend


def test_without_options_gpu_memory_grows_and_operators_may_move(models: Any) -> None:
    config = session_options(models)
    assert config.allow_soft_placement
    assert config.gpu_options.allow_growth
    assert config.gpu_options.per_process_gpu_memory_fraction == 0
    assert config.device_count["GPU"] == 0


@pytest.mark.parametrize(
    ("options", "fraction", "growth"),
    [
        ({"gpu-memory-fraction": "0.5"}, 0.5, False),
        ({"gpu-memory-fraction": "0.5", "allow-growth": "true"}, 0.5, True),
        ({"allow-growth": "false"}, 0, False),
    ],
)
def test_the_memory_of_gpus_is_bounded(models: Any, options: dict[str, str], fraction: float, growth: bool) -> None:
    gpu = session_options(models, options=options, device="gpu").gpu_options
    assert (gpu.per_process_gpu_memory_fraction, gpu.allow_growth) == (fraction, growth)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gpu-memory-fraction": "1.5"}, "gpu-memory-fraction of 'tensorflow' must be from 0 to 1, got '1.5'"),
        ({"gpu-memory-fraction": "nan"}, "gpu-memory-fraction of 'tensorflow' must be from 0 to 1, got 'nan'"),
        ({"gpu-memory-fraction": "half"}, "gpu-memory-fraction of 'tensorflow' must be from 0 to 1, got 'half'"),
        ({"allow-growth": "some"}, "allow-growth of 'tensorflow' must be true or false, got 'some'"),
        ({"allow-soft-placement": "2"}, "allow-soft-placement of 'tensorflow' must be true or false, got '2'"),
        ({"version": "1"}, "version of 'tensorflow' must be 2, got '1'"),
    ],
)
def test_an_option_that_is_none_is_refused(option: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TensorFlow(option)
    assert message in caught.value.message


def test_the_version_is_two() -> None:
    TensorFlow({"version": "2"})


@pytest.mark.parametrize("soft", ["true", "false"])
def test_an_operator_runs_elsewhere_only_if_it_may(models: Any, soft: str) -> None:
    """The graph places an operator on a GPU that does not exist."""

    def build() -> None:
        with tf.device("/device:GPU:7"):
            tf.multiply(tf.compat.v1.placeholder(tf.float32, [None, 2], name="x"), 2.0, name="y")

    models.frozen(build)
    models.config(
        """platform: "tensorflow_graphdef" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }"""
    )
    message = models.reason(backend_config={"tensorflow": {"allow-soft-placement": soft}})
    if soft == "true":
        assert message == ""
    else:
        assert "m/1/model.graphdef': Cannot assign a device" in message
        assert "GPU:7" in message


# ---------------------------------------------------------------------- accelerators and XLA


def accelerators(*names: str, kind: str = "gpu") -> str:
    listed = "".join(f'{kind}_execution_accelerator {{ name: "{name}" }} ' for name in names)
    return f"optimization {{ execution_accelerators {{ {listed} }} }}"


def test_mixed_precision_is_enabled_on_a_gpu(models: Any) -> None:
    from tensorflow.core.protobuf import rewriter_config_pb2

    found = session_options(models, accelerators("auto_mixed_precision"), device="gpu")
    assert found.graph_options.rewrite_options.auto_mixed_precision == rewriter_config_pb2.RewriterConfig.ON
    plain = session_options(models, device="gpu").graph_options.rewrite_options
    assert plain.auto_mixed_precision == rewriter_config_pb2.RewriterConfig.DEFAULT


@pytest.mark.parametrize("names", [("auto_mixed_precision",), ("tensorrt",), ("gpu_io",)])
def test_gpu_accelerators_are_ignored_on_the_cpu(
    models: Any, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert session_options(models, accelerators(*names)) == session_options(models)
    assert "GPU Execution Accelerator will be ignored for model instance on CPU" in caplog.text


def test_the_accelerator_gpu_io_changes_nothing(models: Any) -> None:
    assert session_options(models, accelerators("gpu_io"), device="gpu") == session_options(models, device="gpu")


@pytest.mark.parametrize(
    ("config", "device", "message"),
    [
        (
            accelerators("tensorrt", "auto_mixed_precision"),
            "cpu",
            "Auto mixed precision can not be set with TFTRT optimization",
        ),
        (accelerators("abacus"), "cpu", "unknown Execution Accelerator 'abacus' is requested"),
        (accelerators("x", kind="cpu"), "cpu", "CPU Execution Accelerator is not supported in TensorFlow backend"),
        (accelerators("tensorrt"), "gpu", "which TensorFlow's packages no longer have"),
    ],
)
def test_an_unknown_accelerator_is_refused(models: Any, config: str, device: str, message: str) -> None:
    with pytest.raises((ConfigError, LoadError)) as caught:
        session_options(models, config, device=device)
    assert message in caught.value.message


@pytest.mark.parametrize(("level", "name"), [(-1, "OFF"), (0, "DEFAULT"), (1, "ON_1"), (2, "ON_2"), (7, "ON_2")])
def test_the_level_of_the_graph_is_that_of_xla(models: Any, level: int, name: str) -> None:
    found = session_options(models, f"optimization {{ graph {{ level: {level} }} }}")
    options = found.graph_options.optimizer_options
    assert options.GlobalJitLevel.Name(options.global_jit_level) == name


def test_where_tensorflow_was_imported_without_xla_the_level_has_a_warning(
    models: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "--other")
    session_options(models, "optimization { graph { level: 1 } }")
    assert "optimization.graph.level has no effect" in caplog.text
    caplog.clear()
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")
    session_options(models, "optimization { graph { level: 1 } }")
    assert "optimization.graph.level has no effect" not in caplog.text


PROCESS = """
import json, os, sys
from pathlib import Path
import numpy as np
from headrace import Model, ModelConfig
from headrace_tf import Parameters, TensorFlow
from headrace_tf.tensorflow_process import load_engine
load_engine()
from tensorflow.core.protobuf import config_pb2

def threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())

def open_instance(level):
    backend = TensorFlow({})
    config = ModelConfig(name="m", max_batch_size=4)
    config.optimization.graph.level = level
    parameters = Parameters(intra_threads=int(sys.argv[2]), inter_threads=int(sys.argv[3]))
    model = Model("m", 1, Path(sys.argv[1]) / "m/1", config, parameters, backend.share(None))
    backend.complete_config(model)
    return backend.load(model)

def is_compiled(instance):
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    np.testing.assert_allclose(instance.execute({"A": x, "B": x})["S"], 2 * x, atol=1e-5)
    metadata, options = config_pb2.RunMetadata(), config_pb2.RunOptions(output_partition_graphs=True)
    graph, session = instance._opened.graph, instance._opened.session
    feed = {graph.inputs[name]: x for name in "AB"}
    session.run([graph.outputs["S"]], feed, options=options, run_metadata=metadata)
    return any(node.op == "_XlaRun" for part in metadata.partition_graphs for node in part.node)

before = threads()
plain = open_instance(0)
added = threads() - before
compiled = [is_compiled(plain), is_compiled(open_instance(1))]
print(json.dumps({"threads": added, "compiled": compiled, "log_level": os.environ["TF_CPP_MIN_LOG_LEVEL"]}))
"""


def process(models: Any, *arguments: str, **environ: str) -> tuple[Any, str]:
    """Return the JSON that a new process prints, and its stderr."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(models.root), *arguments],
        capture_output=True, text=True, timeout=150, check=False,
        env=environment | {"TF_ENABLE_ONEDNN_OPTS": "0"} | environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_process_has_the_configured_threads_and_compiler(models: Any) -> None:
    """In two processes, because the threads of a process are set once. XLA compiles only long chains."""
    spec = [tf.TensorSpec([None, 16], tf.float32, name=each) for each in "AB"]

    def chain(A: Any, B: Any) -> Any:  # noqa: N803
        total = A + B
        for _ in range(8):
            total = tf.nn.relu(total + 1) - tf.nn.relu(-total - 1) - 1
        return {"S": total}

    models.save(chain, *spec)
    few, message = process(models, "1", "0")
    many, _ = process(models, "3", "5", TF_CPP_MIN_LOG_LEVEL="1")
    assert (few["log_level"], many["log_level"]) == ("2", "1")
    assert few["compiled"] == many["compiled"] == [False, True]
    assert many["threads"] - few["threads"] == (3 - 1) + (5 - 1)
    assert "This TensorFlow binary is optimized" not in message


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize(("group", "instances"), [("", 2), ("count: 1", 1), ("count: 2", 2), ("count: 64", 64)])
def test_the_first_model_divides_the_cores(
    models: Any, monkeypatch: pytest.MonkeyPatch, group: str, instances: int
) -> None:
    monkeypatch.setattr(tensorflow_process, "_threads_of_process", None)
    config = f"instance_group {{ kind: KIND_CPU {group} }}" if group else ""
    assert session_options(models, config).intra_op_parallelism_threads == max(1, available_cores() // instances)


def test_the_first_model_sets_the_threads_and_the_next_gets_a_warning(
    models: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensorflow_process, "_threads_of_process", None)
    caplog.set_level(logging.INFO, "headrace.tensorflow")
    assert session_options(models, intra_threads=3).intra_op_parallelism_threads == 3
    assert "TensorFlow runs the operators of all models on 3 threads" in caplog.text
    assert session_options(models, intra_threads=5).intra_op_parallelism_threads == 3
    assert "TF_NUM_INTRA_THREADS stays at 3, not 5" in caplog.text
    caplog.clear()
    assert session_options(models).intra_op_parallelism_threads == 3
    assert session_options(models, intra_threads=3).intra_op_parallelism_threads == 3
    assert not caplog.records


@pytest.mark.parametrize(
    ("parameters", "inter", "per_session"),
    [
        ({}, -1, False),
        ({"inter_threads": 3}, 3, False),
        ({"per_session_threads": True}, 0, True),
        ({"inter_threads": 2, "per_session_threads": True}, 2, True),
    ],
)
def test_threads_across_operators_are_set(
    models: Any, parameters: dict[str, Any], inter: int, per_session: bool
) -> None:
    config = session_options(models, **parameters)
    assert (config.inter_op_parallelism_threads, config.use_per_session_threads) == (inter, per_session)


@pytest.mark.parametrize("key", ["TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS"])
def test_a_negative_number_of_threads_is_refused(models: Any, key: str) -> None:
    models.add()
    models.config(models.parameters(**{key: "-1"}))
    assert f"parameter '{key}' must be non-negative number for TensorFlow model" in models.reason()


def test_a_session_has_its_own_threads_if_configured(models: Any) -> None:
    def threads() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    path = models.add()
    with models.loaded(models.model(path)):  # TensorFlow has what all sessions share
        before = threads()
    with models.loaded(models.model(path, parameters=Parameters(per_session_threads=True, inter_threads=5))):
        assert threads() - before == 5


# ---------------------------------------------------------------------- sharing


@pytest.mark.parametrize(("share", "sessions"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_so_many_instances_share_a_session(models: Any, share: int, sessions: int) -> None:
    model = models.model(models.add(), parameters=Parameters(max_session_share_count=share))
    with models.loaded(model, 4) as instances:
        opened = {id(each._opened): each._opened for each in instances}
        assert len(opened) == sessions
        a, b = np.random.default_rng(3).normal(size=(2, 5, 16)).astype(np.float32)
        for instance in instances:
            np.testing.assert_array_equal(instance.execute({"A": a, "B": b})["S"], a + b)
    for each in opened.values():
        assert each.users == 0
        with pytest.raises(RuntimeError, match="closed Session"):
            each.session.run(each.graph.outputs["S"])


@pytest.mark.parametrize("value", ["0", "-2"])
def test_a_session_must_be_shared_by_one_or_more_instances(models: Any, value: str) -> None:
    models.add()
    models.config(models.parameters(MAX_SESSION_SHARE_COUNT=value))
    assert "parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model" in models.reason()


@pytest.mark.parametrize("share", ["1", "4"])
def test_four_instances_answer_side_by_side(models: Any, share: str) -> None:
    """Each caller gets its own rows. Instances count in one variable, or in one each."""
    module = tf.Module()
    module.count = tf.Variable(0, dtype=tf.int32)
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")

    def counted(x: Any) -> Any:
        number = module.count.assign_add(1)
        return {"y": 2 * x, "n": tf.fill([tf.shape(x)[0], 1], number)}

    models.save(counted, spec, module=module)
    models.config(
        "max_batch_size: 1 instance_group { count: 4 kind: KIND_CPU } "
        + models.parameters(MAX_SESSION_SHARE_COUNT=share, event_loop="off")
    )
    with serve(models.root) as server, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> int:
            x = np.full((1, 2), number, np.float32)
            answer = server.infer("m", {"x": x}).outputs
            np.testing.assert_array_equal(answer["y"], 2 * x)
            return int(np.asarray(answer["n"])[0, 0])

        numbers = list(pool.map(ask, range(200)))  # one counts, and another before it has read how far
        assert len(server.served("m")[0].executors) == 4
        last = ask(200)
    if share == "4":
        assert last == 201
    else:
        assert max(numbers) < 200  # the limit is far above the counted value


def test_a_session_is_closed_if_its_variables_cannot_be_restored(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    session = tf.compat.v1.Session

    class Watched(session):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            closed.append(self)
            super().close()

    module = tf.Module()
    module.weights = tf.Variable([1.0, 2.0])
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")
    version: Path = models.save(lambda x: {"y": x * module.weights}, spec, module=module)
    (version / "model.savedmodel/variables/variables.data-00000-of-00001").write_bytes(b"")
    model = models.model(version)
    monkeypatch.setattr(tf.compat.v1, "Session", Watched)
    with pytest.raises(LoadError, match=r"model\.savedmodel") as caught, models.loaded(model):
        pass
    assert len(closed) == 1
    assert caught.tb is not None  # whose frames keep the session, so that no collector has closed it
