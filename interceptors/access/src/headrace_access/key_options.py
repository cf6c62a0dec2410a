"""The flags of the interceptor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace import OptionGroup
from headrace_access.access_rules import matching, parse_patterns

#: The readiness of a model is not open, because it reveals which models exist.
DEFAULT_OPEN = "live,ready"


@dataclass(frozen=True)
class AccessOptions(OptionGroup):
    """Access control. Without --access-keys, every caller may do everything."""

    name: ClassVar[str] = "access"
    keys: str = field(
        default="",
        metadata={"help": "File with principals and keys, created by 'headrace keys'. Callers need a key of it."},
    )
    open: str = field(
        default=DEFAULT_OPEN,
        metadata={"help": "Operations or categories of operations that need no key, such as live,ready,metrics."},
    )

    def __post_init__(self) -> None:
        if self.keys or self.open != DEFAULT_OPEN:
            parse_patterns(self.open, "--access-open")
        if self.open != DEFAULT_OPEN and not self.keys:
            raise ValueError("--access-open needs --access-keys")

    def is_open(self, operation: str, category: str) -> bool:
        """True if the operation needs no key."""
        return matching(parse_patterns(self.open, "--access-open"), operation, category)
