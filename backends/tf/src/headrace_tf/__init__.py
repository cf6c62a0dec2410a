"""The backend ``tensorflow`` of Headrace: SavedModels and frozen graphs, run by TensorFlow.

A model is a directory with a version in it, and the version holds a SavedModel or a frozen graph::

    models/digits/1/model.savedmodel/       # as tf.saved_model.save writes it; needs no config.pbtxt
    models/old/1/model.graphdef             # needs a config that names inputs and outputs

The names of a SavedModel's inputs and outputs are the keys of its signature; the names of a graph's are its
nodes' (``image``) or tensors' (``image:0``). These are the settings that belong to TensorFlow::

    backend: "tensorflow"                   # or platform: "tensorflow_savedmodel", "tensorflow_graphdef"
    parameters { key: "TF_SIGNATURE_DEF" value { string_value: "serving_default" } }
    optimization { graph { level: 1 } }     # XLA; -1 off
    optimization { execution_accelerators { gpu_execution_accelerator { name: "auto_mixed_precision" } } }

`headrace_tf.parameters.Parameters` lists the parameters with their defaults. A graph that reads or writes
files, or runs Python, is refused unless its parameter ``trust`` is true (`headrace_tf.operator_rules`). Backend
options, for all models: ``--backend-config=tensorflow,default-max-batch-size=4``,
``...,gpu-memory-fraction=0.5``, ``...,allow-growth=true``, ``...,allow-soft-placement=true``.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_tf.backend import TensorFlow
from headrace_tf.parameters import Parameters

__all__ = ["Parameters", "TensorFlow"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `TensorFlow`; the engine itself is imported when a model needs it."""
    return [TensorFlow]
