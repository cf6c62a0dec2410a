"""The engines: how each writes a network of networks.py, and how each is called without a server.

``python benchmarks/frameworks.py DIR`` writes all networks for all engines that are installed: a model repository.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from framework import Call, Framework
from networks import NETWORKS, SHAPES, Array, TensorFlowOperators, onnx_bytes
from pytorch_forms import ON_GPU, AotPackage, EagerModule, EagerOnGpu, ExportedProgram, GraphsOnGpu, PyTorch

WARM_UP_CALLS = 20


class OnnxRuntime(Framework):
    name = backend = "onnxruntime"
    package, threads_key = "onnxruntime", "intra_op_thread_count"

    def write(self, network: str, version: Path) -> None:
        (version / "model.onnx").write_bytes(onnx_bytes(network))

    def open(self, version: Path, threads: int) -> Call:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(version / "model.onnx", options, providers=["CPUExecutionProvider"])
        return lambda rows: session.run(["OUTPUT0"], {"INPUT0": rows})[0]


class OnnxRuntimeOnGpu(OnnxRuntime):
    """Convolutions are chosen by rule: by default the engine tries all of them for each new batch size."""

    name, kind, networks = "onnxruntime-gpu", "KIND_GPU", ON_GPU
    config = (
        'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" '
        'parameters { key: "cudnn_conv_algo_search" value: "HEURISTIC" } } } }\n'
    )

    def open(self, version: Path, threads: int) -> Call:
        import onnxruntime

        onnxruntime.preload_dlls()
        options = {"cudnn_conv_algo_search": "HEURISTIC"}
        session = onnxruntime.InferenceSession(version / "model.onnx", providers=[("CUDAExecutionProvider", options)])
        return lambda rows: session.run(["OUTPUT0"], {"INPUT0": rows})[0]


class OpenVino(Framework):
    name = backend = "openvino"
    package, threads_key = "openvino", "INFERENCE_NUM_THREADS"

    def write(self, network: str, version: Path) -> None:
        import openvino

        model = openvino.Core().read_model(onnx_bytes(network))
        openvino.save_model(model, str(version / "model.xml"), compress_to_fp16=False)

    def open(self, version: Path, threads: int) -> Call:
        import openvino

        settings = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        request = openvino.Core().compile_model(str(version / "model.xml"), "CPU", settings).create_infer_request()

        def call(rows: Array) -> Array:
            request.set_input_tensor(0, openvino.Tensor(rows, shared_memory=True))
            request.infer()
            result: Array = request.get_output_tensor(0).data.copy()
            return result

        return call

    def threads_of(self, instances: int, threads: int) -> Mapping[str, str]:
        return {self.threads_key: str(instances * threads)}  # the number is for all instances


class TensorFlow(Framework):
    name = backend = "tensorflow"
    package, threads_key = "tensorflow", "TF_NUM_INTRA_THREADS"

    def write(self, network: str, version: Path) -> None:
        import tensorflow as tf

        def compute(INPUT0: Any) -> dict[str, Any]:  # noqa: N803
            return {"OUTPUT0": NETWORKS[network](TensorFlowOperators(tf), INPUT0)}

        module = tf.Module()
        takes = [tf.TensorSpec([None, *SHAPES[network]], tf.float32, name="INPUT0")]
        module.compute = tf.function(compute, input_signature=takes)
        tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.compute)

    def open(self, version: Path, threads: int) -> Call:
        """Return a callable of a session with operators on the caller's thread: 20 times faster than a signature."""
        import tensorflow as tf
        from tensorflow.core.protobuf import config_pb2

        v1 = tf.compat.v1
        config = v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=-1)
        session = v1.Session(graph=tf.Graph(), config=config)
        with session.graph.as_default():
            meta = v1.saved_model.load(session, ["serve"], str(version / "model.savedmodel"))
        signature = meta.signature_def["serving_default"]
        options = config_pb2.CallableOptions()
        options.feed.append(signature.inputs["INPUT0"].name)
        options.fetch.append(signature.outputs["OUTPUT0"].name)
        options.run_options.inter_op_thread_pool = -1
        run = session._make_callable_from_options(options)
        return lambda rows: run(rows)[0]


FRAMEWORKS: dict[str, Framework] = {
    each.name: each
    for each in (
        OnnxRuntime(),
        OpenVino(),
        PyTorch(),
        ExportedProgram(),
        AotPackage(),
        EagerModule(),
        TensorFlow(),
        OnnxRuntimeOnGpu(),
        EagerOnGpu(),
        GraphsOnGpu(),
    )
}


def installed(kind: str = "KIND_CPU") -> list[str]:
    """Return the names of the engines with instances of ``kind`` that this machine can measure.

    Packages of AOTInductor need a compiler.
    """
    return [
        name
        for name, each in FRAMEWORKS.items()
        if each.kind == kind
        and importlib.util.find_spec(each.package) is not None
        and (name != AotPackage.name or shutil.which("g++"))
    ]


def write_networks(folder: Path, engines: Sequence[str]) -> Path:
    """Write ``<network>_<engine>`` for each of ``engines`` to ``folder``, and return it. Takes a minute for all."""
    for engine in engines:
        subprocess.run([sys.executable, __file__, engine, str(folder)], check=True)  # each in its own process
    return folder


def _write_networks_of(engine: str, folder: Path) -> None:
    for network in FRAMEWORKS[engine].networks:
        version = folder / f"{network}_{engine}" / "1"
        version.mkdir(parents=True)
        FRAMEWORKS[engine].write(network, version)
        (version.parent / "config.pbtxt").write_text(FRAMEWORKS[engine].config_of(network))


@dataclass(frozen=True, slots=True)
class Direct:
    """The result of an engine without a server; CPU time is that of the whole process."""

    rows_per_s: float
    cpu_us: float


class Alone:
    """An engine alone in a process, without a server. A context manager."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        words = [sys.executable, __file__, engine, str(folder), str(threads)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def loop(self, network: str, seconds: float, batches: Mapping[str, int]) -> Direct:
        """Call it in a loop, with sizes in the proportions of ``batches``, the executions of each size."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([network, seconds, batches]) + "\n")
        self._process.stdin.flush()
        return Direct(**json.loads(self._process.stdout.readline()))


def _loop(call: Call, shape: tuple[int, ...], seconds: float, batches: Mapping[str, int]) -> Direct:
    total = sum(batches.values())
    inputs = {int(size): np.zeros((int(size), *shape), np.float32) for size in batches}
    # The least frequent size once or more per round, the others in proportion, a round of about 100. In any order, as
    # in a server: an engine may have work to do whenever the size changes.
    sizes = [int(size) for size, count in batches.items() for _ in range(max(1, round(100 * count / total)))]
    random.Random(0).shuffle(sizes)
    for array in inputs.values():
        for _ in range(WARM_UP_CALLS):
            call(array)
    began, used, rows = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        for size in sizes:
            call(inputs[size])
            rows += size
            if time.perf_counter() - began > seconds:
                break
    cpu_s = time.process_time() - used
    return Direct(rows / (time.perf_counter() - began), cpu_s / rows * 1e6)


def _answer_loops(engine: str, folder: Path, threads: int) -> None:
    """The process of `Alone`: runs a loop for each line, and prints its figures as JSON."""
    calls = {
        each: FRAMEWORKS[engine].open(folder / f"{each}_{engine}" / "1", threads)
        for each in FRAMEWORKS[engine].networks
    }
    for line in sys.stdin:
        network, seconds, batches = json.loads(line)
        print(json.dumps(asdict(_loop(calls[network], SHAPES[network], seconds, batches))), flush=True)


def main(words: list[str]) -> None:
    if len(words) == 1:
        print(write_networks(Path(words[0]), installed()))
    elif len(words) == 2:
        _write_networks_of(words[0], Path(words[1]))
    else:
        _answer_loops(words[0], Path(words[1]), int(words[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
