"""How long a request may wait and how many may wait with it (docs/spec/behaviours.md section 6.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config.model_config_pb2 import ModelConfig, ModelQueuePolicy


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """``default_timeout_ns`` and ``max_size`` are 0 for none. ``postpones``: an expired request
    moves behind the others instead of being rejected."""

    default_timeout_ns: int = 0
    allows_override: bool = False
    max_size: int = 0
    postpones: bool = False

    @classmethod
    def from_config(cls, policy: ModelQueuePolicy) -> QueuePolicy:
        return cls(
            policy.default_timeout_microseconds * 1000,
            policy.allow_timeout_override,
            policy.max_queue_size,
            policy.timeout_action == ModelQueuePolicy.DELAY,
        )

    def timeout_ns(self, requested_us: int) -> int:
        """The timeout of a request; its own counts only if allowed, set and smaller."""
        requested_ns = requested_us * 1000
        if self.allows_override and 0 < requested_ns < self.default_timeout_ns:
            return requested_ns
        return self.default_timeout_ns


@dataclass(frozen=True, slots=True)
class Priorities:
    """The levels of a model's queue, 1 first, up to 2^64 - 1 of them; ``own`` are the policies beside the default."""

    levels: int = 1
    default_level: int = 1
    default: QueuePolicy = QueuePolicy()
    own: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Priorities:
        batching = config.dynamic_batching
        default = QueuePolicy.from_config(batching.default_queue_policy)
        levels = batching.priority_levels
        if not levels:
            return cls(default=default)
        own = {level: QueuePolicy.from_config(policy) for level, policy in batching.priority_queue_policy.items()}
        return cls(levels, batching.default_priority_level, default, own)

    def level(self, requested: int) -> int:
        """The level of a request; 0 and levels that do not exist mean the default."""
        return requested if 1 <= requested <= self.levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.own.get(level, self.default)
