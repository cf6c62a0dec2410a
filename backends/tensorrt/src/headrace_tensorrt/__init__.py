"""The backend ``tensorrt`` of Headrace: TensorRT plans on NVIDIA GPUs.

A model is a directory with a version in it, and the version holds the plan::

    models/detector/1/model.plan

That is enough: inputs, outputs, ``max_batch_size`` and dynamic batching are read from the plan. These settings in a
``config.pbtxt`` are for TensorRT::

    platform: "tensorrt_plan"                                        # or backend: "tensorrt"
    cc_model_filenames { key: "9.0" value: "hopper.plan" }           # a plan per compute capability
    instance_group { count: 2 gpus: [ 0, 1 ] profile: [ "0", "1" ] } # two on each; the nearest profile executes
    optimization { priority: PRIORITY_MAX cuda { graphs: true } }    # the stream's priority; captured executions
    parameters { key: "execution_context_allocation_strategy" value { string_value: "ON_PROFILE_CHANGE" } }

`headrace_tensorrt.parameters.Parameters` lists the parameters. Backend options, for all models:
``--backend-config=tensorrt,plugins=a.so;b.so`` loads custom layers, and ``...,version-compatible=true`` allows plans
with their own runtime. TensorRT itself is a separate package: see the README.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_tensorrt.backend import TensorRT
from headrace_tensorrt.parameters import Parameters

__all__ = ["Parameters", "TensorRT"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `TensorRT`; the engine itself is imported when a model needs it."""
    return [TensorRT]
