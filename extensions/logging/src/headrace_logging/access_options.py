"""The flags of the access log."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from headrace import Caller, OptionGroup
from headrace_logging.access_lines import JsonLines, TextLines
from headrace_logging.line_file import LineFile
from headrace_logging.running_operation import RunningOperation


@dataclass(frozen=True)
class AccessLogOptions(OptionGroup):
    """A line for each operation of each protocol."""

    name: ClassVar[str] = "access-log"
    file: str = field(default="", metadata={"help": "The file of the access log; '-' for stdout. Empty: no log."})
    format: Literal["text", "json"] = field(default="text", metadata={"help": "The format of a line."})
    sample: int = field(default=1, metadata={"help": "Log one in this many operations. 1: all."})

    def __post_init__(self) -> None:
        if self.sample < 1:
            raise ValueError(f"--access-log-sample is {self.sample}; the least is 1, which logs every operation")
        if not self.file and (self.format != "text" or self.sample != 1):
            raise ValueError("--access-log-format and --access-log-sample need --access-log-file")

    @cached_property
    def running(self) -> dict[Caller, RunningOperation]:
        """The operations of the one server that has these options."""
        return {}

    @cached_property
    def lines(self) -> LineFile:
        """The file of the one server that has these options. Raises `ConfigError` if it can not be opened."""
        lines = JsonLines() if self.format == "json" else TextLines()
        return LineFile(self.file, lines, "access log", "--access-log-file")
