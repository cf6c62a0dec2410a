"""The flags of the control mode, and the parameters of one model in its ``config.pbtxt``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from headrace import ConfigError, ModelConfig, OptionGroup

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", re.ASCII)

PINNED, KEEP_ALIVE = "control.pinned", "control.keep_alive_seconds"
MEMORY, GPU_MEMORY = "control.memory", "control.gpu_memory"
_KEYS = (PINNED, KEEP_ALIVE, MEMORY, GPU_MEMORY)


@dataclass(frozen=True)
class OnDemandOptions(OptionGroup):
    """Loads of models at their first request: --model-control-mode=on-demand."""

    name: ClassVar[str] = "on-demand"
    memory: str = field(default="", metadata={"help": "Memory for models, such as 4GiB or 500MB. Empty: no limit."})
    gpu_memory: str = field(default="", metadata={"help": "Memory for models on each GPU, such as 0:8GiB,1:8GiB."})
    pinned: str = field(
        default="", metadata={"help": "Models that are loaded at start and never evicted, such as a,b."}
    )
    keep_alive: float = field(
        default=0,
        metadata={"help": "Seconds after which an idle model is unloaded. 0: only when its memory is needed."},
    )
    wait: float = field(default=60, metadata={"help": "Maximum seconds that a request waits for its model."})
    max_waiting: int = field(default=1000, metadata={"help": "Maximum requests that wait for models."})
    pause: float = field(default=10, metadata={"help": "Seconds from a failed load to the next attempt."})
    patience: float = field(
        default=1,
        metadata={
            "help": "Seconds that a load waits for idle models. After that, busy models get no new requests until "
            "they are evicted."
        },
    )

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("keep-alive", self.keep_alive, 0),
            ("wait", self.wait, 0),
            ("max-waiting", self.max_waiting, 1),
            ("pause", self.pause, 0),
            ("patience", self.patience, 0),
        ):
            if not (isfinite(value) and value >= least):
                raise ValueError(f"--on-demand-{flag} is {value}; it is a finite number from {least} on")
        if self.memory:
            parse_size("--on-demand-memory", self.memory)
        gpu_limits(self.gpu_memory)

    @property
    def limits(self) -> Mapping[str, int]:
        """The budget in bytes of each device that has one: ``host``, ``gpu 0``."""
        host = {"host": parse_size("--on-demand-memory", self.memory)} if self.memory else {}
        return host | {f"gpu {gpu}": size for gpu, size in gpu_limits(self.gpu_memory).items()}

    @property
    def pinned_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, (name.strip() for name in self.pinned.split(",")))))


def parse_size(what: str, text: str) -> int:
    """Return the size ``text`` in bytes: ``4GiB``, ``500MB``, ``1048576``. Raises `ValueError`."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"{what} is '{text}'; it is a size above 0, such as 4GiB, 500MB or a number of bytes")
    return size


def gpu_limits(text: str) -> dict[int, int]:
    """Return the budget of each GPU in ``0:8GiB,1:8GiB``. Raises `ValueError`."""
    limits: dict[int, int] = {}
    for part in filter(None, text.split(",")):
        gpu, colon, size = part.partition(":")
        if not (colon and gpu.isascii() and gpu.isdigit() and len(gpu) < 5) or int(gpu) in limits:
            raise ValueError(f"--on-demand-gpu-memory is '{text}'; it is the number of each GPU once, as in 0:8GiB")
        limits[int(gpu)] = parse_size("--on-demand-gpu-memory", size)
    return limits


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The parameters of one model. ``memory`` and ``gpu_memory`` are its least charges in bytes."""

    pinned: bool = False
    keep_alive_s: float | None = None
    memory: int = 0
    gpu_memory: int = 0


def read_settings(config: ModelConfig) -> ModelSettings:
    """Return the parameters ``control.*`` of ``config``. Raises `ConfigError`."""
    values = {key: value.string_value for key, value in config.parameters.items() if key.startswith("control.")}
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"unknown parameter '{key}'; known: {', '.join(_KEYS)}", field=f"parameters[{key!r}]")
    try:
        pinned = {"true": True, "false": False, "": False}.get(values.get(PINNED, "").lower())
        if pinned is None:
            raise ValueError(f"parameter '{PINNED}' is '{values[PINNED]}', expected true or false")
        memory, gpu_memory = (parse_size(f"parameter '{k}'", values[k]) if k in values else 0 for k in _KEYS[2:])
        return ModelSettings(pinned, _seconds(values.get(KEEP_ALIVE)), memory, gpu_memory)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"parameter '{KEEP_ALIVE}' is '{text}', expected a number of seconds from 0 on")
    return value
