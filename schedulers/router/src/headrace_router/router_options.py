"""The flags of routers, and what the routers of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from headrace import OptionGroup

if TYPE_CHECKING:
    from headrace_router.board import TrafficBoard


@dataclass(frozen=True)
class RouterOptions(OptionGroup):
    """Models that split their requests between other models."""

    name: ClassVar[str] = "router"
    shadows: int = field(
        default=64, metadata={"help": "Maximum number of copied requests in flight to the shadow of one router."}
    )

    headers: bool = field(default=False, metadata={"help": "Routers may decide by headers of requests."})

    def __post_init__(self) -> None:
        if self.shadows < 1:
            raise ValueError(f"--router-shadows is {self.shadows}; the least is 1")

    @cached_property
    def board(self) -> TrafficBoard:
        """The common state of the routers of the server with these options."""
        from headrace_router.board import TrafficBoard

        return TrafficBoard()
