"""How long a request may wait and how many may wait with it (behaviours.md section 6.3)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.model_config_pb2 import ModelConfig, ModelQueuePolicy


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
    """The levels of a model's queue, 1 first, and the policy of each."""

    default_level: int = 1
    policies: tuple[QueuePolicy, ...] = (QueuePolicy(),)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Priorities:
        batching = config.dynamic_batching
        default = QueuePolicy.from_config(batching.default_queue_policy)
        levels = batching.priority_levels
        if not levels:
            return cls(1, (default,))
        own = batching.priority_queue_policy
        policies = tuple(QueuePolicy.from_config(own[n]) if n in own else default for n in range(1, levels + 1))
        return cls(batching.default_priority_level, policies)

    def level(self, requested: int) -> int:
        """The level of a request; 0 and levels that do not exist mean the default."""
        return requested if 1 <= requested <= len(self.policies) else self.default_level
