"""The master's picture of all instances: who they are, how they fare, how loaded they are.

Records say who is there, health says who may be used, loads say how busy. Load reports are old when they
arrive, so what was dispatched since counts on top until a report names it (see `reservations.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.core.health.fault_levels import EJECTS_FROM, Level
from pdmesh.core.health.liveness import Health
from pdmesh.core.kv.transfer.source_exclusions import HeldSource
from pdmesh.core.placement.predictor import LatencyPredictor
from pdmesh.core.placement.reservations import Booking, Reservations

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
    held_sources: tuple[HeldSource, ...] = ()  # of a decode: whom it refuses or avoids
    is_ready: bool = True  # else it is not connected with its peers yet
    revision: str = ""  # of what was assigned: model, KV layout, transport
    fetches_from_peers: bool = False  # blocks out of their host pools
    region: str = ""
    kv_region: str = ""  # that its KV stays in; empty: its group spans regions

    @property
    def cell(self) -> tuple[str, str]:
        return (self.group_id, f"{self.model_fingerprint}/{self.revision}/{self.kv_region}")


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
class FaultJudged:
    """What the health-monitor holds against one incarnation. `held_back` is empty if it is to be acted on."""

    instance_id: str
    incarnation: int
    level: Level
    reasons: tuple[str, ...] = ()
    held_back: str = ""
    since: float = 0.0  # unix seconds, by the health-monitor's clock


@dataclass(frozen=True, slots=True)
class FaultForgotten:
    instance_id: str


@dataclass(frozen=True, slots=True)
class IsolationSeen:
    """All instances that are isolated now, whatever they say of themselves."""

    instance_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class JudgeLost:
    """No health-monitor is there: its last suspicions would stand forever."""


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """One prompt's compute as the instance timed it, without the wait for prompts before it; 0 seconds: not timed."""

    request_id: str
    num_tokens: int
    num_cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReported:
    instance_id: str
    incarnation: int
    num_slots: int
    num_slots_used: int
    num_kv_blocks_free: int
    is_draining: bool
    admitted: Sequence[str] = ()  # request ids since the last report
    computed: Sequence[PrefillComputed] = ()


Event = (
    RecordSeen
    | RecordVanished
    | HealthJudged
    | FaultJudged
    | FaultForgotten
    | IsolationSeen
    | JudgeLost
    | LoadReported
)


@dataclass(slots=True)
class Instance:
    """One instance as placement sees it."""

    identity: Identity
    health: Health = Health.HEALTHY
    fault: FaultJudged | None = None
    is_isolated: bool = False
    num_slots: int = 0
    num_slots_used: int = 0
    num_kv_blocks_free: int = 0
    is_draining: bool = False
    reported_at: float | None = None
    computed_s: float = 0.0  # of prefills, all so far, as it timed them
    id: str = field(init=False)
    kind: str = field(init=False)  # instances of one kind take equally long for a prompt
    available_at: float = 0.0  # when what is booked here is predicted to be computed (S93)
    backlog_s: float = 0.0
    num_backlog_blocks: int = 0  # to be computed
    num_booked: int = 0  # requests that no report shows yet
    num_booked_blocks: int = 0

    def __post_init__(self) -> None:
        self.id = self.identity.instance_id
        self.kind = f"{self.identity.model_fingerprint}/{self.identity.role.value}"

    @property
    def is_usable(self) -> bool:
        is_going = self.is_draining or self.identity.is_draining
        is_there = self.health is Health.HEALTHY and self.identity.is_ready
        return is_there and not (is_going or self.is_ejected or self.is_isolated)

    @property
    def is_ejected(self) -> bool:
        """It gets no requests for a fault that is acted on (S34)."""
        fault = self.fault
        return fault is not None and fault.level >= EJECTS_FROM and not fault.held_back

    @property
    def is_decode(self) -> bool:
        return self.identity.role is Role.DECODE

    def used_slots(self) -> int:
        """Reported ones and those dispatched since."""
        return self.num_slots_used + self.num_booked

    def free_blocks(self) -> int:
        return max(0, self.num_kv_blocks_free - self.num_booked_blocks)

    def add_booking(self, booking: Booking, now: float) -> None:
        self.num_booked += 1
        self.num_booked_blocks += booking.num_blocks
        self.add_backlog(booking, now)

    def remove_booking(self, booking: Booking, now: float) -> None:
        self.num_booked -= 1
        self.num_booked_blocks -= booking.num_blocks
        self.remove_backlog(booking, now)

    def add_backlog(self, booking: Booking, now: float) -> None:
        self.backlog_s += booking.seconds
        self.num_backlog_blocks += booking.num_new_blocks
        self.available_at = max(self.available_at, now) + booking.seconds

    def remove_backlog(self, booking: Booking, now: float) -> None:
        self.num_backlog_blocks -= booking.num_new_blocks
        self.backlog_s = (
            max(0.0, self.backlog_s - booking.seconds) if self.num_backlog_blocks else 0.0
        )
        self.available_at = max(now, self.available_at - booking.seconds)

    def resume_backlog(self, now: float) -> None:
        """A prompt was computed just now, so the next begins: the prediction starts from here."""
        self.available_at = now + self.backlog_s


@dataclass(slots=True)
class Fleet:
    """The only way to change state is `handle`."""

    instances: dict[str, Instance] = field(default_factory=dict)
    predictor: LatencyPredictor = field(default_factory=LatencyPredictor)
    reservations: Reservations = field(default_factory=Reservations)
    version: int = 0  # grows whenever who may be a candidate may have changed
    _judged: dict[str, HealthJudged] = field(
        default_factory=dict
    )  # a verdict may precede the record
    _faults: dict[str, FaultJudged] = field(default_factory=dict)
    _isolated: frozenset[str] = frozenset()

    def handle(self, event: Event, now: float) -> None:
        match event:
            case LoadReported():
                self._on_load(event, now)
                return
            case RecordSeen():
                self._on_record(event.identity)
            case RecordVanished():
                self._forget(event.instance_id)
                self._judged.pop(event.instance_id, None)
                self._faults.pop(event.instance_id, None)
            case HealthJudged():
                self._on_health(event)
            case FaultJudged():
                self._on_fault(event)
            case FaultForgotten():
                self._on_fault_forgotten(event)
            case IsolationSeen():
                self._on_isolation(event)
            case JudgeLost():
                self._trust_again()
        self.version += 1

    def settle(self, now: float) -> None:
        """Let bookings lapse that no report has named."""
        self.reservations.expire(now)

    def check_invariants(self) -> None:
        for instance_id, instance in self.instances.items():
            assert instance.identity.instance_id == instance_id
            bookings = self.reservations.of(instance)
            open_ones = [b for b in bookings if not b.is_admitted]
            assert instance.num_booked == len(open_ones)
            assert instance.num_booked_blocks == sum(b.num_blocks for b in open_ones)
            assert instance.num_backlog_blocks == sum(b.num_new_blocks for b in bookings)

    def _forget(self, instance_id: str) -> None:
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            self.reservations.forget_instance(instance)

    def _on_record(self, identity: Identity) -> None:
        known = self.instances.get(identity.instance_id)
        if known is not None and known.identity.incarnation == identity.incarnation:
            known.identity = identity
            known.num_slots = known.num_slots or identity.num_slots
            return
        self._forget(identity.instance_id)
        instance = self.instances[identity.instance_id] = Instance(
            identity, num_slots=identity.num_slots, num_kv_blocks_free=identity.num_kv_blocks
        )
        instance.is_isolated = identity.instance_id in self._isolated
        judged = self._judged.get(identity.instance_id)
        if judged is not None and judged.incarnation == identity.incarnation:
            instance.health = judged.health
        fault = self._faults.get(identity.instance_id)
        if fault is not None and fault.incarnation == identity.incarnation:
            instance.fault = fault

    def _on_health(self, event: HealthJudged) -> None:
        self._judged.pop(event.instance_id, None)
        self._judged[event.instance_id] = event
        if len(self._judged) > _MAX_JUDGED:
            del self._judged[next(iter(self._judged))]
        instance = self.instances.get(event.instance_id)
        if instance is not None and instance.identity.incarnation == event.incarnation:
            instance.health = event.health

    def _on_fault(self, event: FaultJudged) -> None:
        self._faults.pop(event.instance_id, None)
        self._faults[event.instance_id] = event
        if len(self._faults) > _MAX_JUDGED:
            del self._faults[next(iter(self._faults))]
        instance = self.instances.get(event.instance_id)
        if instance is not None and instance.identity.incarnation == event.incarnation:
            instance.fault = event

    def _on_fault_forgotten(self, event: FaultForgotten) -> None:
        self._faults.pop(event.instance_id, None)
        if event.instance_id in self.instances:
            self.instances[event.instance_id].fault = None

    def _on_isolation(self, event: IsolationSeen) -> None:
        self._isolated = event.instance_ids
        for instance in self.instances.values():
            instance.is_isolated = instance.id in event.instance_ids

    def _trust_again(self) -> None:
        self._judged.clear()
        self._faults.clear()
        for instance in self.instances.values():
            instance.health, instance.fault = Health.HEALTHY, None

    def _on_load(self, event: LoadReported, now: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is None or instance.identity.incarnation != event.incarnation:
            return
        instance.num_slots = event.num_slots
        instance.num_slots_used = event.num_slots_used
        instance.num_kv_blocks_free = event.num_kv_blocks_free
        if instance.is_draining != event.is_draining:
            instance.is_draining = event.is_draining
            self.version += 1
        instance.reported_at = now
        self.reservations.admitted(instance, event.admitted, now)
        for prefill in event.computed:
            self.reservations.computed(prefill.request_id, now)
            if prefill.seconds > 0:
                instance.computed_s += prefill.seconds
                fit = self.predictor.fit(instance.kind)
                fit.observe(prefill.num_tokens, prefill.num_cached_tokens, prefill.seconds)
        if not event.num_slots_used and instance.num_backlog_blocks:
            self.reservations.idle(instance, now)
