"""The flags of security that are no flags of Triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from headrace.config.option_groups import OptionGroup
from headrace.config.option_parts import RESTRICTED_CATEGORIES
from headrace.messages.operation import Operation


@dataclass(frozen=True)
class SecurityOptions(OptionGroup):
    """The permissions of callers without a key."""

    name: ClassVar[str] = "security"
    profile: Literal["none", "public"] = field(
        default="none",
        metadata={
            "help": "public: the defaults of a server that strangers can reach. It does not start without TLS and "
            "credentials, and a warning says what other flags open."
        },
    )
    closed: str = field(
        default="",
        metadata={"help": "Operations or categories that are refused to everybody, such as load,trace,logging."},
    )

    def __post_init__(self) -> None:
        known = {*map(str, Operation), *RESTRICTED_CATEGORIES}
        for name in self.closed_names:
            # An extension may have an operation of any name in these letters.
            if name not in known and not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"--security-closed: '{name}' is no operation and no category")

    @property
    def closed_names(self) -> frozenset[str]:
        """The operations and categories that are refused."""
        return frozenset(filter(None, map(str.strip, self.closed.split(","))))
