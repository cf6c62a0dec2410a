"""The part of TensorRT's Python API that `headrace_tensorrt.plan_engine` uses, with the types of its bindings.

TensorRT has no type stubs. A test without a GPU (``tests/backends/tensorrt/test_tensorrt_api.py``) compares these
protocols with the signatures in the classes of the bindings. They are for TensorRT 11.4. Add every further call here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class TrtDims(Protocol):
    """A shape; -1 is any size."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...


class TrtEnumerator(Protocol):
    """A member of one of TensorRT's enumerations."""

    @property
    def name(self) -> str: ...


class TrtExecutionContext(Protocol):
    """Executes an engine: one execution at a time."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def get_tensor_shape(self, name: str) -> TrtDims: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool: ...

    def infer_shapes(self) -> list[str]: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class TrtCudaEngine(Protocol):
    """A plan on a GPU."""

    weight_streaming_budget_v2: int

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def num_optimization_profiles(self) -> int: ...

    @property
    def refittable(self) -> bool: ...

    @property
    def streamable_weights_size(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> TrtEnumerator: ...

    def get_tensor_dtype(self, name: str) -> TrtEnumerator: ...

    def get_tensor_shape(self, name: str) -> TrtDims: ...

    def get_tensor_location(self, name: str) -> TrtEnumerator: ...

    def is_shape_inference_io(self, name: str) -> bool: ...

    def get_tensor_format(self, name: str) -> TrtEnumerator: ...

    def get_tensor_format_desc(self, name: str) -> str: ...

    def get_tensor_vectorized_dim(self, name: str) -> int: ...

    def get_tensor_components_per_element(self, name: str) -> int: ...

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[TrtDims]: ...

    def get_tensor_profile_values(self, profile_index: int, name: str, /) -> list[list[int]]:
        """Call it by position only: the bindings have the names of its two parameters swapped."""

    def create_execution_context(self, strategy: TrtEnumerator) -> TrtExecutionContext | None: ...


class TrtRuntime(Protocol):
    """Creates an engine from a plan."""

    engine_host_code_allowed: bool
    DLA_core: int

    @property
    def num_DLA_cores(self) -> int: ...  # noqa: N802  as TensorRT spells it

    def deserialize_cuda_engine(self, serialized_engine: Any) -> TrtCudaEngine | None: ...


class TrtRefitter(Protocol):
    """Replaces weights of an engine."""

    def set_named_weights(self, name: str, weights: Any) -> bool: ...

    def get_missing_weights(self) -> list[str]: ...

    def refit_cuda_engine(self) -> bool: ...


class TrtPluginRegistry(Protocol):
    """The registry of libraries with custom layers."""

    def load_library(self, plugin_path: str) -> Any: ...


class TrtModule(Protocol):
    """The module ``tensorrt``. ``ILogger`` and ``IOutputAllocator`` are classes to derive from, the strategies an
    enumeration."""

    @property
    def __version__(self) -> str: ...

    @property
    def ILogger(self) -> Any: ...  # noqa: N802

    @property
    def IOutputAllocator(self) -> Any: ...  # noqa: N802

    @property
    def ExecutionContextAllocationStrategy(self) -> Any: ...  # noqa: N802

    @property
    def Runtime(self) -> Callable[[Any], TrtRuntime]: ...  # noqa: N802

    @property
    def Refitter(self) -> Callable[[Any, Any], TrtRefitter]: ...  # noqa: N802

    @property
    def Weights(self) -> Callable[[npt.NDArray[np.generic]], Any]: ...  # noqa: N802

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> bool: ...

    def get_plugin_registry(self) -> TrtPluginRegistry: ...
