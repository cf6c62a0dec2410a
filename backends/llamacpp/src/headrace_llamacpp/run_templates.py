"""The program of `headrace_llamacpp.template_checks`: llama.cpp with a stand-in model, whose chat template it runs.

An input is JSON: an object with ``file``, a model to open, and an empty ``folder``; or with ``chat``, to be rendered.
The answer is the error, empty for a chat with any result, or `CLOSED` if there is no model.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import tempfile
from time import sleep
from typing import Any, Final

from headrace import one_line
from headrace_llamacpp.llama_server import load_library, new_settings
from headrace_llamacpp.stand_in import CLOSED
from headrace_llm import serve_job

#: A parameter that llama.cpp refuses as soon as it has rendered the chat.
_REFUSED: Final = {"top_logprobs": 1}
_MOST_LOG_BYTES: Final = 1 << 16
#: A record of llama.cpp's log: the time, the level, perhaps the part of the server, the function, and the text.
_ERROR: Final = re.compile(r"^\d[\d.]+ E (?:\w+ +)?\w+: (?:error: )?(.*?)(?=\n\d+\.\d+\.)", re.MULTILINE | re.DOTALL)


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
        if "file" in asked:
            return b"" if engines else _open(**asked)
        if not engines:
            return CLOSED
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # the load of the model reports the error
            engines[0].handle_chat_completions({**asked["chat"], **_REFUSED})
        return b""

    def _open(file: str, folder: str) -> bytes:
        settings = new_settings(library, file, f"{folder}/closed.sock")
        settings.n_parallel, settings.n_ctx = 1, 64
        settings.n_batch = settings.n_ubatch = 64
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.cache_ram_mib = settings.n_gpu_layers = 0
        try:
            engines.append(library.Server(settings))
        except RuntimeError as error:
            return (_reason(log.fileno()) or str(error)).encode()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return b""

    serve_job(answer)
    os._exit(0)  # an engine that has answered nothing yet would wait for itself


def _end_without_memory() -> None:
    """End the process when memory is missing: llama.cpp would go on after a template that took too much."""
    with contextlib.suppress(OSError, AttributeError):  # another C++ library
        handle = ctypes.CDLL("libstdc++.so.6")._ZSt15set_new_handlerPFvvE
        handle(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))


def _reason(log: int) -> str:
    """Return the first error in llama.cpp's ``log``, without what stands before it in its line; empty if it has none.

    Another thread of llama.cpp writes the log.
    """
    for _ in range(100):
        if found := _ERROR.search(os.pread(log, _MOST_LOG_BYTES, 0).decode("utf-8", "replace")):
            return one_line(found[1])[:400]
        sleep(0.01)
    return ""


if __name__ == "__main__":
    main()
