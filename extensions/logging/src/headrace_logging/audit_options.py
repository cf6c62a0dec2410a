"""The flags of the audit log."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from headrace import OptionGroup
from headrace_logging.audit_trail import AuditTrail


@dataclass(frozen=True)
class AuditLogOptions(OptionGroup):
    """A line for each operation that changes something, and for each refusal."""

    name: ClassVar[str] = "audit-log"
    file: str = field(
        default="",
        metadata={"help": "The file of the audit log; 'stderr', or '-' for stdout. Empty: no log."},
    )
    format: Literal["text", "json"] = field(default="text", metadata={"help": "The format of a line."})
    refusals: int = field(
        default=10, metadata={"help": "Maximum lines of refusals per second. Further ones are only counted."}
    )
    size: int = field(
        default=1024,
        metadata={"help": "Size of the file in MiB above which refusals are only counted. Move the file to restart."},
    )

    def __post_init__(self) -> None:
        for name, value, least in (("refusals", self.refusals, 0), ("size", self.size, 1)):
            if value < least:
                raise ValueError(f"--audit-log-{name} is {value}; the least is {least}")
        if not self.file and (self.format, self.refusals, self.size) != ("text", 10, 1024):
            raise ValueError("--audit-log-format, --audit-log-refusals and --audit-log-size need --audit-log-file")

    @cached_property
    def trail(self) -> AuditTrail:
        """The log of the one server that has these options. Raises `ConfigError` if the file can not be opened."""
        return AuditTrail(self.file, self.format == "json", self.refusals, self.size << 20)
