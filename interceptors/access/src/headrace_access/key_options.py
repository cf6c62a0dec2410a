"""The flags of the interceptor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace import OptionGroup
from headrace_access.key_file import matching, parse_patterns


@dataclass(frozen=True)
class AccessOptions(OptionGroup):
    """Who may use the server. Without --access-keys, everyone may do everything."""

    name: ClassVar[str] = "access"
    keys: str = field(
        default="", metadata={"help": "File with principals and keys, made by 'headrace keys'. A caller needs a key."}
    )
    open: str = field(
        default="health",
        metadata={"help": "Operations, or categories of operations, that need no key: a list such as health,metrics."},
    )

    def __post_init__(self) -> None:
        if self.keys or self.open != "health":
            parse_patterns(self.open, "--access-open")
        if self.open != "health" and not self.keys:
            raise ValueError("--access-open needs --access-keys")

    def is_open(self, operation: str, category: str) -> bool:
        """True if the operation needs no key."""
        return matching(parse_patterns(self.open, "--access-open"), operation, category)
