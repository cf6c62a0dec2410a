"""Tools for authors of backends, for any engine. They import only what `headrace` exports.

A backend makes a `Graph` of the inputs and outputs that its engine finds in a model file. `complete_from_graph` fills a
config from it, and `check_against_graph` compares the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_engines.engine_libraries import read_libraries
    from headrace_engines.graph import Graph, GraphTensor
    from headrace_engines.graph_config import check_against_graph, complete_from_graph, default_max_batch_size
    from headrace_engines.instance_threads import set_torch_threads, threads_beside_server, threads_per_instance
    from headrace_engines.onnx_references import OnnxFile, check_onnx_references, onnx_repeats, read_onnx_file
    from headrace_engines.private_modules import PrivateModules

#: The module of each name, imported on first use: a process of a model may have no protobuf.
_HOMES = {
    "Graph": "graph",
    "GraphTensor": "graph",
    "OnnxFile": "onnx_references",
    "PrivateModules": "private_modules",
    "check_against_graph": "graph_config",
    "check_onnx_references": "onnx_references",
    "complete_from_graph": "graph_config",
    "default_max_batch_size": "graph_config",
    "onnx_repeats": "onnx_references",
    "read_libraries": "engine_libraries",
    "read_onnx_file": "onnx_references",
    "set_torch_threads": "instance_threads",
    "threads_beside_server": "instance_threads",
    "threads_per_instance": "instance_threads",
}

__all__ = [
    "Graph",
    "GraphTensor",
    "OnnxFile",
    "PrivateModules",
    "check_against_graph",
    "check_onnx_references",
    "complete_from_graph",
    "default_max_batch_size",
    "onnx_repeats",
    "read_libraries",
    "read_onnx_file",
    "set_torch_threads",
    "threads_beside_server",
    "threads_per_instance",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace_engines' has no attribute '{name}'")
    value = getattr(import_module(f"headrace_engines.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
