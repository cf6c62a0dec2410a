"""Which distribution brings a backend that Triton has, for those who look for it."""

from __future__ import annotations

_WRITTEN = {"onnxruntime": "headrace-onnx", "python": "headrace-python"}
#: What those are to be called that Triton has and nobody has written for Headrace yet.
_PLANNED = {
    name: f"headrace-{name}"
    for name in ("dali", "fil", "openvino", "pytorch", "tensorflow", "tensorrt", "tensorrtllm", "vllm")
}


def is_known(kind: str, name: str) -> bool:
    """Whether ``name`` is a part that exists elsewhere, and no slip of the pen."""
    return kind == "backend" and name in _WRITTEN | _PLANNED


def backend_missing(name: str) -> str:
    """What to say where no plugin has the backend ``name``, in Triton's words and then in ours."""
    text = f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    if name in _WRITTEN:
        return f"{text} It comes with the distribution {_WRITTEN[name]}: pip install {_WRITTEN[name]};"
    if name in _PLANNED:
        return f"{text} Its distribution, {_PLANNED[name]}, is not published yet;"
    return text
