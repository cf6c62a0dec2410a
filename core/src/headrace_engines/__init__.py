"""Tools for authors of backends, for any engine. They import only what `headrace` exports.

A backend makes a `Graph` of the inputs and outputs that its engine finds in a model file. `complete_from_graph` fills a
config from it, and `check_against_graph` compares the two. `AddressedTensor`, `dl_tensor` and `cuda_library` are for
tensors in the memory of a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_engines.addressed_tensors import (
        DLPACK_CODES,
        MOST_AXES,
        AddressedMemory,
        AddressedTensor,
        DLTensor,
        address_of,
        dl_tensor,
        is_contiguous,
        is_dlpack,
    )
    from headrace_engines.cuda_calls import IPC_HANDLE_BYTES, CudaError, CudaLibrary, cuda_library
    from headrace_engines.engine_libraries import read_libraries
    from headrace_engines.engine_version import check_engine_version
    from headrace_engines.graph import Graph, GraphTensor
    from headrace_engines.graph_config import check_against_graph, complete_from_graph, default_max_batch_size
    from headrace_engines.import_environment import import_environment, wait_policy
    from headrace_engines.instance_threads import set_torch_threads, threads_beside_server, threads_per_instance
    from headrace_engines.onnx_references import OnnxFile, check_onnx_references, onnx_repeats, read_onnx_file
    from headrace_engines.private_modules import PrivateModules

#: The module of each name, imported on first use: a process of a model may have no protobuf.
_HOMES = {
    "DLPACK_CODES": "addressed_tensors",
    "IPC_HANDLE_BYTES": "cuda_calls",
    "MOST_AXES": "addressed_tensors",
    "AddressedMemory": "addressed_tensors",
    "AddressedTensor": "addressed_tensors",
    "CudaError": "cuda_calls",
    "CudaLibrary": "cuda_calls",
    "DLTensor": "addressed_tensors",
    "Graph": "graph",
    "GraphTensor": "graph",
    "OnnxFile": "onnx_references",
    "PrivateModules": "private_modules",
    "address_of": "addressed_tensors",
    "check_against_graph": "graph_config",
    "check_engine_version": "engine_version",
    "check_onnx_references": "onnx_references",
    "complete_from_graph": "graph_config",
    "cuda_library": "cuda_calls",
    "default_max_batch_size": "graph_config",
    "dl_tensor": "addressed_tensors",
    "import_environment": "import_environment",
    "is_contiguous": "addressed_tensors",
    "is_dlpack": "addressed_tensors",
    "onnx_repeats": "onnx_references",
    "read_libraries": "engine_libraries",
    "read_onnx_file": "onnx_references",
    "set_torch_threads": "instance_threads",
    "threads_beside_server": "instance_threads",
    "threads_per_instance": "instance_threads",
    "wait_policy": "import_environment",
}

__all__ = [
    "DLPACK_CODES",
    "IPC_HANDLE_BYTES",
    "MOST_AXES",
    "AddressedMemory",
    "AddressedTensor",
    "CudaError",
    "CudaLibrary",
    "DLTensor",
    "Graph",
    "GraphTensor",
    "OnnxFile",
    "PrivateModules",
    "address_of",
    "check_against_graph",
    "check_engine_version",
    "check_onnx_references",
    "complete_from_graph",
    "cuda_library",
    "default_max_batch_size",
    "dl_tensor",
    "import_environment",
    "is_contiguous",
    "is_dlpack",
    "onnx_repeats",
    "read_libraries",
    "read_onnx_file",
    "set_torch_threads",
    "threads_beside_server",
    "threads_per_instance",
    "wait_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace_engines' has no attribute '{name}'")
    value = getattr(import_module(f"headrace_engines.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
