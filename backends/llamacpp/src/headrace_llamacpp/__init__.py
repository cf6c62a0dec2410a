"""The backend ``llamacpp`` of Headrace: language models in GGUF files, run by llama.cpp.

A model is a directory with a version in it, and the version holds the file::

    models/smollm/1/model.gguf

That is enough. Files with no repository around them are served by ``--model-repository=gguf:///home/me/models``. The
parameters of a ``config.pbtxt`` are those of `headrace_llamacpp.parameters.Parameters`::

    parameters { key: "context" value { string_value: "8192" } }     # tokens of one request
    parameters { key: "slots" value { string_value: "8" } }          # requests that run at once
    parameters { key: "task" value { string_value: "embedding" } }   # or reranking

llama.cpp is native code, and some inputs end its process. So each instance runs in a process of its own, unless the
model parameter ``isolation`` is ``thread``.
"""

from __future__ import annotations

from headrace import Backend, Storage, hookimpl
from headrace_llamacpp.backend import LlamaCpp
from headrace_llamacpp.gguf_storage import GgufStorage
from headrace_llamacpp.parameters import Parameters

__all__ = ["GgufStorage", "LlamaCpp", "Parameters"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `LlamaCpp`; the engine itself is imported when a model needs it."""
    return [LlamaCpp]


@hookimpl
def register_storages() -> list[type[Storage]]:
    """Return `GgufStorage`."""
    return [GgufStorage]
