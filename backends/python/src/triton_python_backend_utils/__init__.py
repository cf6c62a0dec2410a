"""What a Python model imports as ``pb_utils``."""

from __future__ import annotations

from triton_python_backend_utils.error import TritonError, TritonModelException
from triton_python_backend_utils.flags import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
)
from triton_python_backend_utils.memory import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    MemoryType,
    PreferredMemory,
)
from triton_python_backend_utils.request import InferenceRequest
from triton_python_backend_utils.response import InferenceResponse
from triton_python_backend_utils.sender import InferenceResponseSender
from triton_python_backend_utils.tensor import Tensor
from triton_python_backend_utils.trace import InferenceTrace

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "MemoryType",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
]
