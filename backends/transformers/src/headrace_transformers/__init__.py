"""The backend ``transformers`` of Headrace: language models in the form of Hugging Face, run by their own library.

A version directory is what ``save_pretrained`` writes, or ``hf download``::

    models/chat/1/config.json
    models/chat/1/model.safetensors
    models/chat/1/tokenizer.json
    models/chat/config.pbtxt        # backend: "transformers"

The config needs no more: task, inputs and outputs are read from ``config.json``. `Parameters` lists its parameters.
Tasks are those of `headrace_llm.Task`: generation, embedding, reranking, classification, transcription.
"""

from __future__ import annotations

from headrace import Backend, hookimpl
from headrace_transformers.backend import Transformers
from headrace_transformers.parameters import Parameters

__all__ = ["Parameters", "Transformers"]


@hookimpl
def register_backends() -> list[type[Backend]]:
    """`Transformers`; the engine itself is imported when a model needs it."""
    return [Transformers]
