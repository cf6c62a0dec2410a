"""A backend that completes a config as its option ``do`` selects. Imported by tests and by their children."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import ClassVar

from headrace.backends.base import AnyInstance, Backend, Model
from headrace.errors import Code, ConfigError, LoadError


class Completing(Backend):
    """Adds an output whose name is the number of the process."""

    name: ClassVar[str] = "completing"

    def load(self, model: Model) -> AnyInstance:
        raise NotImplementedError

    def complete_config(self, model: Model) -> None:
        deed = self.options.get("do", "")
        if deed == "crash":
            ctypes.string_at(0)
        elif deed == "exit":
            os._exit(3)
        elif deed == "hang":
            threading.Event().wait()
        elif deed == "fill":
            bytearray(1 << 32)
        elif deed == "config":
            raise ConfigError("no such dims", Code.UNSUPPORTED, field="input[0].dims")
        elif deed == "load":
            raise LoadError("no such file", Code.NOT_FOUND)
        elif deed == "stranger":
            raise SystemExit("enough")
        model.config.max_batch_size = 3
        model.config.output.add(name=str(os.getpid()), dims=[1])
        model.config.backend = "other"
        model.config.parameters["isolation"].string_value = "thread"
