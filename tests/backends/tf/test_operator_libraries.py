"""Libraries of operators, compiled on the spot against TensorFlow's own headers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import BackendError, HeadraceError, Server
from headrace_testing.serving import on_loop, serve

tf = pytest.importorskip("tensorflow")
GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="there is no g++ that could make a library of operators")

#: ``y = factor * x + extra``; it prints, forks a child that ends at once, and raises where ``x`` begins with a NaN.
SOURCE = """
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
using namespace tensorflow;
REGISTER_OP("NAME").Input("x: float").Output("y: float").SetIsStateful();
class NAMEOp : public OpKernel {
 public:
  explicit NAMEOp(OpKernelConstruction* context) : OpKernel(context) {}
  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &y));
    auto from = x.flat<float>();
    auto to = y->flat<float>();
    for (int i = 0; i < from.size(); i++) to(i) = FACTOR * from(i);
    std::printf("printed by an operator\\n");
    std::fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    OP_REQUIRES(context, from.size() == 0 || from(0) == from(0), errors::InvalidArgument("x begins with a NaN"));
  }
};
REGISTER_KERNEL_BUILDER(Name("NAME").Device(DEVICE_CPU), NAMEOp);
"""

CONFIG = """platform: "tensorflow_graphdef" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
LIBRARY = 'model_operations { op_library_filename: "libtimes.so" } '


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the operator ``HeadraceTimesThree``. Compiled once, because that takes half a minute of a core."""
    folder = tmp_path_factory.mktemp("library")
    source = folder / "times.cc"
    source.write_text(SOURCE.replace("NAME", "HeadraceTimesThree").replace("FACTOR", "3.0f"))
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command = [str(GXX), "-shared", "-fPIC", "-O0", "-w", str(source), "-o", str(folder / "libtimes.so"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode:
        pytest.skip(f"g++ cannot compile against TensorFlow's headers: {done.stderr.strip().splitlines()[-1]}")
    return folder / "libtimes.so"


def graph_bytes(operator: str = "HeadraceTimesThree") -> bytes:
    """A graph with one such operator, made without the library."""
    graph = tf.compat.v1.GraphDef()
    x = graph.node.add(name="x", op="Placeholder")
    x.attr["dtype"].type = 1
    x.attr["shape"].shape.CopyFrom(tf.TensorShape([None, 2]).as_proto())
    graph.node.add(name="y", op=operator, input=["x"])
    return bytes(graph.SerializeToString())


def write(models: Any, name: str = "m", config: str = CONFIG + LIBRARY) -> Path:
    version: Path = models.root / name / "1"
    version.mkdir(parents=True)
    (version / "model.graphdef").write_bytes(graph_bytes())
    models.config(config, name)
    return version


@pytest.mark.parametrize("place", [".", ".."])
def test_a_librarys_operator_runs(models: Any, compiled: Path, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It prints and forks as well, and neither disturbs the server."""
    shutil.copy(compiled, write(models) / place)
    x = np.array([[1, 2], [3, 4]], np.float32)
    with serve(models.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": x}).outputs["y"], 3 * x)
        with pytest.raises(BackendError, match="x begins with a NaN"):
            server.infer("m", {"x": np.full((1, 2), np.nan, np.float32)})
        np.testing.assert_array_equal(server.infer("m", {"x": -x}).outputs["y"], -3 * x)
    # Three requests, and the one that failed alone was not run again.
    assert capfd.readouterr().out.count("printed by an operator") == 3


def test_the_same_library_is_loaded_once(models: Any, compiled: Path) -> None:
    """TensorFlow would have two kernels then, and use none."""
    for name in ("m", "n"):
        shutil.copy(compiled, write(models, name))
    x = np.ones((1, 2), np.float32)
    with serve(models.root) as server:
        for name in ("m", "n"):
            np.testing.assert_array_equal(server.infer(name, {"x": x}).outputs["y"], 3 * x)


def test_a_model_that_does_not_name_the_library_has_none_of_its_operators(models: Any, compiled: Path) -> None:
    shutil.copy(compiled, write(models, "named"))
    write(models, "m", CONFIG)
    message = models.reason()
    assert "the operator 'HeadraceTimesThree' (node 'y'), which this TensorFlow does not have" in message
    assert "op_library_filename" in message


def test_other_contents_in_the_place_of_a_library_are_refused(models: Any, compiled: Path) -> None:
    version = write(models, "replaced")
    shutil.copy(compiled, version)
    x = np.ones((1, 2), np.float32)
    with serve(models.root, model_control_mode="explicit", load_model=("*",)) as server:
        (version / "libtimes.so").unlink()
        (version / "libtimes.so").write_bytes(compiled.read_bytes() + b"\0")
        with pytest.raises(HeadraceError, match="is not the library of that name that this process has loaded"):
            on_loop(server, server.load("replaced"))
        np.testing.assert_array_equal(server.infer("replaced", {"x": x}).outputs["y"], 3 * x)


def test_a_file_that_is_no_library_is_refused(models: Any) -> None:
    (write(models) / "libtimes.so").write_bytes(b"\0this is no library")
    assert "m/1/libtimes.so': " in models.reason()


def test_a_library_that_is_not_there_is_named(models: Any) -> None:
    write(models)
    assert "no file '" in (message := models.reason())
    assert "libtimes.so' for model 'm' version 1" in message


@pytest.mark.parametrize("name", ["../../other/libtimes.so", "/usr/lib/libtimes.so"])
def test_a_library_elsewhere_is_refused(models: Any, name: str) -> None:
    write(models, config=CONFIG + LIBRARY.replace("libtimes.so", name))
    assert name in models.reason()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_library_that_is_sent_is_refused(models: Any, compiled: Path, isolation: str) -> None:
    shutil.copy(compiled, write(models, config=CONFIG))
    with serve(models.root, model_control_mode="explicit", exit_on_error=False) as server:
        refused = load_refused(server, {"model_operations": {"op_library_filename": ["libtimes.so"]}}, isolation)
    assert "op_library_filename 'libtimes.so' of model 'm' came with a load request" in refused


def load_refused(server: Server, more: dict[str, Any], isolation: str) -> str:
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "platform": "tensorflow_graphdef",
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "parameters": {"isolation": {"string_value": isolation}},
    }

    async def load() -> str:
        try:
            await server.load("m", {"config": json.dumps({**config, **more})})
        except HeadraceError as error:
            return error.message
        return ""

    return on_loop(server, asyncio.wait_for(load(), 60))
