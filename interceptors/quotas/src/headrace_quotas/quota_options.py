"""The flags of the interceptor."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import ClassVar

from headrace import OptionGroup


@dataclass(frozen=True)
class QuotaOptions(OptionGroup):
    """Limits of each caller. A request beyond a limit is refused with 429 or RESOURCE_EXHAUSTED."""

    name: ClassVar[str] = "quota"
    file: str = field(
        default="",
        metadata={"help": "File with the quotas of principals, instead of the next three flags."},
    )
    rate: float = field(default=0, metadata={"help": "Inferences per second of one caller. 0: no limit."})
    burst: int = field(
        default=0,
        metadata={"help": "Inferences that a caller may send at once after a pause. 0: those of 1 s, at least 1."},
    )
    in_flight: int = field(default=0, metadata={"help": "Inferences of one caller in flight. 0: no limit."})
    tenants: int = field(
        default=100, metadata={"help": "Principals with their own metrics. All others are counted as 'other'."}
    )

    def __post_init__(self) -> None:
        if not isfinite(self.rate):
            raise ValueError(f"--quota-rate is {self.rate}; it is a finite number")
        numbers = {"rate": self.rate, "burst": self.burst, "in-flight": self.in_flight, "tenants": self.tenants}
        for flag, value in numbers.items():
            if value < 0:
                raise ValueError(f"--quota-{flag} is {value}; the least is 0")
        if self.burst and not self.rate:
            raise ValueError("--quota-burst needs --quota-rate")
        if self.file and (self.rate or self.in_flight):
            raise ValueError(
                "--quota-file has the limits of all callers: --quota-rate, --quota-burst and "
                "--quota-in-flight cannot be set beside it"
            )
