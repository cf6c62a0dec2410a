"""The program of `headrace_llamacpp.template_checks`: llama.cpp with a stand-in model, whose chat template it runs.

An input is JSON, an object. Its one member is ``folder``, whose file ``stand_in.gguf`` is opened, or ``chat``, which is
rendered. The answer is what is wrong, which is nothing for a chat with any result, or `CLOSED` if there is no model.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import tempfile
from typing import Any, Final

from headrace import one_line
from headrace_llamacpp.llama_server import load_library, new_settings
from headrace_llamacpp.stand_in import CLOSED, FILE
from headrace_llm import serve_job

#: A parameter that llama.cpp refuses as soon as it has rendered the chat.
_REFUSED: Final = {"top_logprobs": 1}
_MOST_LOG_BYTES: Final = 1 << 16


def main() -> None:
    """Answer each input of the standard input until it ends."""
    library = load_library()
    _end_without_memory()
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_LOG_BYTES, _MOST_LOG_BYTES))
    log = tempfile.TemporaryFile()  # noqa: SIM115 (it is open until the end)
    os.dup2(log.fileno(), 2)
    engines: list[Any] = []

    def answer(given: bytes) -> bytes:
        asked = json.loads(given)
        if "folder" in asked:
            return b"" if engines else _open(asked["folder"])
        if not engines:
            return CLOSED
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # the model itself says what is wrong
            engines[0].handle_chat_completions({**asked["chat"], **_REFUSED})
        return b""

    def _open(folder: str) -> bytes:
        settings = new_settings(library, f"{folder}/{FILE}", f"{folder}/closed.sock")
        settings.n_parallel, settings.n_ctx = 1, 64
        settings.n_batch = settings.n_ubatch = 64
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.cache_ram_mib = settings.n_gpu_layers = 0
        try:
            engines.append(library.Server(settings))
        except RuntimeError as error:
            return _reason(os.pread(log.fileno(), _MOST_LOG_BYTES, 0), str(error)).encode()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return b""

    serve_job(answer)
    os._exit(0)  # an engine that has answered nothing yet would wait for itself


def _end_without_memory() -> None:
    """End the process when memory is missing: llama.cpp would go on after a template that took too much."""
    with contextlib.suppress(OSError, AttributeError):  # another C++ library
        handle = ctypes.CDLL("libstdc++.so.6")._ZSt15set_new_handlerPFvvE
        handle(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))


def _reason(log: bytes, error: str) -> str:
    """Return the first error in llama.cpp's ``log``, without what stands before it in its line; else ``error``."""
    _, _, found = log.decode("utf-8", "replace").partition("error: ")
    return one_line(re.split(r"\n\d+\.\d+\.\d+", found or error)[0])[:400]


if __name__ == "__main__":
    main()
