"""The master's picture of all instances: who they are, how they fare, how loaded they are.

Records say who is there, health says who may be used, loads say how busy. Load reports are old when they
arrive, so what was dispatched since counts on top (a credit that settles with the next report, or after a second).
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from pdmesh.core.health import Health

_SETTLED_AFTER_S = 0.03  # a report this much younger than a dispatch includes it
_CREDIT_S = 1.0
_MAX_CREDITS = 4096
_MAX_JUDGED = 65_536


class Role(enum.Enum):
    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"
    FUSION = "fusion"


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance's record says. Two instances may hand KV to each other if `cell` is equal (S13)."""

    instance_id: str
    incarnation: int
    role: Role
    group_id: str
    scenario: str
    model: str
    model_fingerprint: str
    block_size: int
    num_slots: int
    num_kv_blocks: int
    max_model_len: int
    is_draining: bool = False

    @property
    def cell(self) -> tuple[str, str]:
        return (self.group_id, self.model_fingerprint)


@dataclass(frozen=True, slots=True)
class RecordSeen:
    identity: Identity


@dataclass(frozen=True, slots=True)
class RecordVanished:
    instance_id: str


@dataclass(frozen=True, slots=True)
class HealthJudged:
    """The health-monitor's word on one incarnation."""

    instance_id: str
    incarnation: int
    health: Health


@dataclass(frozen=True, slots=True)
class JudgeLost:
    """No health-monitor is there: its last suspicions would stand forever."""


@dataclass(frozen=True, slots=True)
class LoadReported:
    instance_id: str
    incarnation: int
    num_slots: int
    num_slots_used: int
    num_kv_blocks_free: int
    is_draining: bool


Event = RecordSeen | RecordVanished | HealthJudged | JudgeLost | LoadReported


@dataclass(slots=True)
class Instance:
    """One instance as placement sees it."""

    identity: Identity
    health: Health = Health.HEALTHY
    num_slots: int = 0
    num_slots_used: int = 0
    num_kv_blocks_free: int = 0
    is_draining: bool = False
    reported_at: float | None = None
    _credits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_CREDITS))
    _credit_blocks: int = 0

    @property
    def is_usable(self) -> bool:
        return (
            self.health is Health.HEALTHY and not self.is_draining and not self.identity.is_draining
        )

    def used_slots(self) -> int:
        """Reported ones and those dispatched since."""
        return self.num_slots_used + len(self._credits)

    def free_blocks(self) -> int:
        return max(0, self.num_kv_blocks_free - self._credit_blocks)

    def dispatch(self, num_blocks: int, now: float) -> None:
        """A request was sent its way that the last report cannot include."""
        if len(self._credits) < _MAX_CREDITS:
            self._credits.append((now, num_blocks))
            self._credit_blocks += num_blocks

    def settle(self, older_than: float) -> None:
        while self._credits and self._credits[0][0] < older_than:
            self._credit_blocks -= self._credits.popleft()[1]


@dataclass(slots=True)
class Fleet:
    """The only way to change state is `handle`."""

    instances: dict[str, Instance] = field(default_factory=dict)
    _judged: dict[str, HealthJudged] = field(
        default_factory=dict
    )  # a verdict may precede the record

    def handle(self, event: Event, now: float) -> None:
        match event:
            case RecordSeen():
                self._on_record(event.identity)
            case RecordVanished():
                self.instances.pop(event.instance_id, None)
                self._judged.pop(event.instance_id, None)
            case HealthJudged():
                self._on_health(event)
            case JudgeLost():
                self._trust_again()
            case LoadReported():
                self._on_load(event, now)

    def settle(self, now: float) -> None:
        """Let credits lapse that no report has confirmed."""
        for instance in self.instances.values():
            instance.settle(now - _CREDIT_S)

    def check_invariants(self) -> None:
        for instance_id, instance in self.instances.items():
            assert instance.identity.instance_id == instance_id
            assert instance._credit_blocks == sum(blocks for _, blocks in instance._credits)

    def _on_record(self, identity: Identity) -> None:
        known = self.instances.get(identity.instance_id)
        if known is not None and known.identity.incarnation == identity.incarnation:
            known.identity = identity
            known.num_slots = known.num_slots or identity.num_slots
            return
        instance = self.instances[identity.instance_id] = Instance(
            identity, num_slots=identity.num_slots, num_kv_blocks_free=identity.num_kv_blocks
        )
        judged = self._judged.get(identity.instance_id)
        if judged is not None and judged.incarnation == identity.incarnation:
            instance.health = judged.health

    def _on_health(self, event: HealthJudged) -> None:
        self._judged.pop(event.instance_id, None)
        self._judged[event.instance_id] = event
        if len(self._judged) > _MAX_JUDGED:
            del self._judged[next(iter(self._judged))]
        instance = self.instances.get(event.instance_id)
        if instance is not None and instance.identity.incarnation == event.incarnation:
            instance.health = event.health

    def _trust_again(self) -> None:
        self._judged.clear()
        for instance in self.instances.values():
            instance.health = Health.HEALTHY

    def _on_load(self, event: LoadReported, now: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is None or instance.identity.incarnation != event.incarnation:
            return
        instance.num_slots = event.num_slots
        instance.num_slots_used = event.num_slots_used
        instance.num_kv_blocks_free = event.num_kv_blocks_free
        instance.is_draining = event.is_draining
        instance.reported_at = now
        instance.settle(now - _SETTLED_AFTER_S)
