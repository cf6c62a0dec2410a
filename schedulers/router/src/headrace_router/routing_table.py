"""The routing table of a router: its targets, and what decides about a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import Dependency
from headrace_router.differences import Tolerance
from headrace_router.rollback import RollbackRule

NEWEST = -1


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """A model that answers for the router. ``label`` is its name as written, such as ``digits:2``."""

    label: str
    dependency: Dependency

    @property
    def version(self) -> str:
        """The version as requests name it; empty for the newest."""
        return "" if self.dependency.version == NEWEST else str(self.dependency.version)


@dataclass(frozen=True, slots=True)
class RequestValue:
    """The source of a value of a request: ``kind`` is ``header``, ``parameter`` or ``sequence``."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests with ``value`` (None: any value) in ``source`` go to the target with the index ``target``."""

    source: RequestValue
    value: str | None
    target: int


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """A checked routing table. ``weights`` are in the order of ``targets``, of which the first is the baseline."""

    targets: Sequence[RouteTarget]
    weights: Sequence[float]
    sticky: RequestValue | None = None
    rules: Sequence[Rule] = ()
    #: The shadow, and the fraction of the requests that it gets, from 0 to 1.
    shadow: tuple[RouteTarget, float] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    rollback: RollbackRule = field(default_factory=RollbackRule)

    @property
    def labels(self) -> list[str]:
        return [target.label for target in self.targets]

    @property
    def dependencies(self) -> set[Dependency]:
        """The models that must be loaded."""
        shadow = {self.shadow[0].dependency} if self.shadow else set()
        return {target.dependency for target in self.targets} | shadow

    @property
    def reads_headers(self) -> bool:
        """True if a decision depends on a header."""
        sources = [rule.source for rule in self.rules] + ([self.sticky] if self.sticky else [])
        return any(source.kind == "header" for source in sources)
