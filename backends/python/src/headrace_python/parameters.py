"""The ``parameters`` of a Python model's config, and ``--backend-config=python,key=value`` for all models.

Source: docs/spec/behaviours.md section 9.6. A model gets all ``parameters`` in ``args["model_config"]``, and may define
its own. The backend reads three keys. Triton's settings for shared-memory regions and for the thread pool of BLS are
checked, and have no effect. ``isolation``, ``load-timeout-seconds`` and ``busy-poll-microseconds`` are Headrace's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from headrace import Code, ConfigError

#: The key that names the environment of a model.
ENVIRONMENT = "EXECUTION_ENV_PATH"
#: The key that keeps inputs in memory of the host.
HOST_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters that the backend reads; core reads ``isolation``."""

    #: A packed environment, its directory, or a file of requirements; empty for the server's own.
    execution_env_path: str = field(default="", metadata={"key": ENVIRONMENT})
    #: ``no``: inputs on a GPU stay there, for an instance on a GPU in a process. Else they are in memory of the host.
    force_cpu_only_input_tensors: str = field(default="yes", metadata={"key": HOST_INPUTS})
    #: Every other entry: the model's own.
    own: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": ""})

    def __post_init__(self) -> None:
        if self.force_cpu_only_input_tensors not in ("yes", "no"):
            raise ConfigError(
                # Triton's text: with a quote at the end only.
                f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {self.force_cpu_only_input_tensors}'",
                Code.UNSUPPORTED,
                field="parameters['FORCE_CPU_ONLY_INPUT_TENSORS']",
            )


_MIN_REGION_BYTES = 1 << 20
_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """The backend's settings.

    - ``isolation``: where an instance runs by default.
    - ``stub_timeout_s``: the limit of ``auto_complete_config``.
    - ``load_timeout_s``: the limit of the model's part of a load. A process that loads a model has both limits.
    - ``busy_poll_us``: the default for models (`headrace.backends.base.Isolation`).
    """

    isolation: Literal["process", "thread"] = "process"
    stub_timeout_s: int = 30
    load_timeout_s: int = 600
    busy_poll_us: int = 0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Settings:
        """Raises `ConfigError` naming the setting, its value and the rule."""
        for key, (check, rule) in _CHECKED.items():
            if key in options and not check(_number(key, options[key])):
                raise ConfigError(f"{key} {rule}")
        _check_region_name(options.get("shm-region-prefix-name", "triton_python_backend_shm_region_"))
        isolation = options.get("isolation", "process")
        if isolation not in ("process", "thread"):
            raise ConfigError(f"backend option isolation of 'python' is '{isolation}', expected process or thread")
        return cls(
            cast("Literal['process', 'thread']", isolation),
            _number("stub-timeout-seconds", options.get("stub-timeout-seconds", "30")),
            _number("load-timeout-seconds", options.get("load-timeout-seconds", "600")),
            _microseconds("busy-poll-microseconds", options.get("busy-poll-microseconds", "0")),
        )


def _positive(value: int) -> bool:
    return value > 0


_CHECKED: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "shm-default-byte-size": (lambda value: value >= _MIN_REGION_BYTES, "can't be smaller than 1 MiB"),
    "shm-growth-byte-size": (_positive, "can't be smaller than or equal to zero."),
    "stub-timeout-seconds": (_positive, "can't be smaller than or equal to zero."),
    "load-timeout-seconds": (_positive, "can't be smaller than or equal to zero."),
    "thread-pool-size": (_positive, "can't be less than 1."),
}


def _check_region_name(prefix: str) -> None:
    if not prefix:
        raise ConfigError("shm-region-prefix-name must at least contain one character.")
    if not re.fullmatch(r"[A-Za-z0-9_\-.]+", prefix):
        raise ConfigError("Invalid shared memory region name: contains invalid characters")


def _microseconds(key: str, text: str) -> int:
    """Return the number in ``text``, at most a second: polling takes a whole core."""
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _SECOND_US:
        return int(text)
    shown = text if len(text) < 100 else f"{text[:100]}..."
    raise ConfigError(
        f"backend option {key} of 'python' is '{shown}', expected a number of microseconds from 0 to {_SECOND_US}"
    )


def _number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"backend option {key} of 'python' must be a whole number, got '{text}'") from None
