"""The backend ``pytorch`` of Headrace: files that PyTorch writes, and modules in Python, run by PyTorch.

A model is a directory with a config and a version, and the version holds the file::

    models/digits/config.pbtxt
    models/digits/1/model.pt

The file has no shapes and data types, so the config names inputs and outputs::

    platform: "pytorch_libtorch"                               # or backend: "pytorch"
    max_batch_size: 32
    input [{ name: "image" data_type: TYPE_FP32 dims: [64] }]  # an argument of forward, or image__0
    output [{ name: "scores__0" data_type: TYPE_FP32 dims: [10] }]
    parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }

A program of torch.export, ``model.pt2``, has shapes and data types, and needs no config. A package of AOTInductor has
the same file name, and is native code: it needs the parameter ``trust``.

With ``runtime: "model.py"`` that file has a class that extends ``torch.nn.Module``, and ``model.pt`` or
``model.safetensors`` beside it has its weights (`headrace_torch.eager`). The parameter
``TORCH_COMPILE_OPTIONAL_PARAMETERS`` compiles it (`headrace_torch.torch_compile`).

`headrace_torch.parameters.Parameters` lists the parameters with their defaults, and
`headrace_torch.tensor_names` maps names to arguments and results. The modules, by kind of file:

| File | Opened by | Checked by |
|---|---|---|
| ``model.pt``, TorchScript | ``script`` | ``script_check``, ``pickle_check``, ``unsafe_operators`` |
| ``model.py`` and its weights | ``eager``, ``weights``, ``torch_compile`` | ``pickle_check`` |
| ``model.pt2``, a program | ``exported_program``, ``program_graph`` | ``program_check``, ``program_sizes`` |
| ``model.pt2``, a package | ``aoti`` | ``aoti_signature`` |

``pt2_archive`` reads a ``model.pt2``. Everything runs as a ``Forward`` of ``instance``; ``tensor_conversion`` and
``torch_tensors`` convert tensors.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_torch.backend import PyTorch
from headrace_torch.parameters import Parameters

__all__ = ["Parameters", "PyTorch"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """Return `PyTorch`; the engine itself is imported when a model needs it."""
    return [PyTorch]
