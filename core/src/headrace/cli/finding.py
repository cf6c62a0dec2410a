"""What ``headrace check`` has found out about one model."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config.provenance import Completion


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where.

    ``line`` and ``column`` count from 1, and are 0 where the place is not known, or not in the file.
    ``field`` is a path in the config, empty if none is at fault; ``code`` is the printed name of an error code.
    """

    file: str
    line: int
    column: int
    field: str
    message: str
    code: str

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number)
        field = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        return f"{self.file}{place}: {field}{self.message}"


@dataclass(slots=True)
class Finding:
    """What is wrong with a model, and which fields were filled in, by whom.

    ``path`` is the config file, or the model's directory if there is none.
    """

    model: str
    path: str
    problems: list[Problem] = field(default_factory=list)
    completed: list[Completion] = field(default_factory=list)
