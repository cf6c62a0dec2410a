"""The backend ``openvino`` of Headrace: models of OpenVINO, run by OpenVINO.

A model is a directory with a version in it, and the version holds the graph and its weights::

    models/digits/1/model.xml
    models/digits/1/model.bin

Inputs, outputs, ``max_batch_size`` and dynamic batching are read from the graph. Settings in a ``config.pbtxt``::

    backend: "openvino"
    default_model_filename: "model.onnx"    # what else OpenVINO reads
    parameters { key: "PERFORMANCE_HINT" value { string_value: "LATENCY" } }

`headrace_openvino.parameters.Parameters` lists the parameters with their defaults. The instances of a version share one
compiled model. Backend option, for all models: ``--backend-config=openvino,default-max-batch-size=4``.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_openvino.backend import OpenVino
from headrace_openvino.parameters import Parameters

__all__ = ["OpenVino", "Parameters"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `OpenVino`; the engine itself is imported when a model needs it."""
    return [OpenVino]
