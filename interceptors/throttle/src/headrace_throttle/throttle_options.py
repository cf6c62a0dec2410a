"""The flags of the interceptor."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from headrace import OptionGroup


@dataclass(frozen=True)
class ThrottleOptions(OptionGroup):
    """Limits for the inferences of each caller. What is beyond them is refused with 429 or RESOURCE_EXHAUSTED."""

    name: ClassVar[str] = "throttle"
    rate: float = field(default=0, metadata={"help": "Inferences per second of one caller. 0: no limit."})
    burst: int = field(
        default=0,
        metadata={"help": "Inferences that may come at once after a pause. 0: those of one second, and at least one."},
    )
    concurrent: int = field(default=0, metadata={"help": "Inferences of one caller in flight. 0: no limit."})

    def __post_init__(self) -> None:
        if not isfinite(self.rate):
            raise ValueError(f"--throttle-rate is {self.rate}; it is a finite number")
        for field_name, value in (("rate", self.rate), ("burst", self.burst), ("concurrent", self.concurrent)):
            if value < 0:
                raise ValueError(f"--throttle-{field_name} is {value}; the least is 0")
        if self.burst and not self.rate:
            raise ValueError("--throttle-burst needs --throttle-rate")
