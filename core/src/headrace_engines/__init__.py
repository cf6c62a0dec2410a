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
    "addressed_tensors": (
        "DLPACK_CODES",
        "MOST_AXES",
        "AddressedMemory",
        "AddressedTensor",
        "DLTensor",
        "address_of",
        "dl_tensor",
        "is_contiguous",
        "is_dlpack",
    ),
    "cuda_calls": ("IPC_HANDLE_BYTES", "CudaError", "CudaLibrary", "cuda_library"),
    "engine_libraries": ("read_libraries",),
    "engine_version": ("check_engine_version",),
    "graph": ("Graph", "GraphTensor"),
    "graph_config": ("check_against_graph", "complete_from_graph", "default_max_batch_size"),
    "import_environment": ("import_environment", "wait_policy"),
    "instance_threads": ("set_torch_threads", "threads_beside_server", "threads_per_instance"),
    "onnx_references": ("OnnxFile", "check_onnx_references", "onnx_repeats", "read_onnx_file"),
    "private_modules": ("PrivateModules",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

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
    if name not in _HOME:
        raise AttributeError(f"module 'headrace_engines' has no attribute '{name}'")
    value = getattr(import_module(f"headrace_engines.{_HOME[name]}"), name)
    globals()[name] = value
    return value
