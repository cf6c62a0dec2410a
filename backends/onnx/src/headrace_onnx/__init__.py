"""The backend ``onnxruntime`` of Headrace: ONNX models, run by ONNX Runtime.

A model is a directory with a version in it, and the version holds the graph::

    models/digits/1/model.onnx

That is enough: inputs, outputs, ``max_batch_size`` and dynamic batching are read from the graph. These settings in a
``config.pbtxt`` are for ONNX Runtime::

    backend: "onnxruntime"                                     # or platform: "onnxruntime_onnx"
    parameters { key: "intra_op_thread_count" value { string_value: "2" } }
    optimization { graph { level: 1 } }                        # -1 basic, 1 extended, 2 off
    optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
    model_operations { op_library_filename: "libmyops.so" }    # in the version or the model

`headrace_onnx.parameters.Parameters` lists the parameters with their defaults. CPU instances of a
version share one session, so their weights are in memory once. Backend options, for all models:
``--backend-config=onnxruntime,default-max-batch-size=4``, ``...,enable-global-threadpool=1`` with
``...,intra_op_thread_count=N`` and ``...,inter_op_thread_count=N``.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_onnx.backend import OnnxRuntime
from headrace_onnx.parameters import Parameters

__all__ = ["OnnxRuntime", "Parameters"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `OnnxRuntime`; the engine itself is imported when a model needs it."""
    return [OnnxRuntime]
