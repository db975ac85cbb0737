"""Decides which processes are alive, from their leases and heartbeats.

Each process has a record in the registry under a lease, and sends heartbeats on the message bus. A
process is HEALTHY while heartbeats arrive, SUSPECT after one lease without any, and DEAD after
three leases or when its record vanishes. A late heartbeat never revives a dead process. The return
of its record revives it, unless that incarnation, one life of the process, has deregistered or was
replaced. While the bus is away, or after this process was paused, silence proves nothing. No
process is judged then (F18).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.model import Tick

SUSPECT_AFTER_LEASES = 1
DEAD_AFTER_LEASES = 3
MAX_TOMBSTONES = 4096


class Health(enum.Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """The registry holds a record of this incarnation."""

    instance_id: str
    incarnation: int
    service: str


@dataclass(frozen=True, slots=True)
class RecordVanished:
    """The record is gone, because its lease ended or its owner deregistered."""

    instance_id: str
    is_lease_end: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    instance_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BusLost:
    """No heartbeat can arrive now."""


@dataclass(frozen=True, slots=True)
class BusRestored:
    """Heartbeats can arrive again. Some may have been lost."""


Event = RecordSeen | RecordVanished | Heartbeat | BusLost | BusRestored | Tick


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """A change to announce. `before` is None for an incarnation that was not known."""

    instance_id: str
    incarnation: int
    service: str
    before: Health | None
    after: Health
    # One of registered, heartbeat_resumed, heartbeat_missed, lease_expired, deregistered, replaced.
    cause: str
    silent_s: float = 0.0


@dataclass(slots=True)
class _Instance:
    incarnation: int
    service: str
    heard_at: float
    health: Health = Health.HEALTHY


@dataclass(slots=True)
class HealthTracker:
    """The health of all processes.

    Only `handle` changes it, and returns the changes to announce.
    """

    lease_s: float
    _instances: dict[str, _Instance] = field(default_factory=dict)
    _tombstones: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    _is_deaf: bool = False
    _ticked_at: float | None = None
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @recorded
    def handle(self, event: Event, now: float) -> list[HealthChanged]:
        match event:
            case Heartbeat():
                return self._on_heartbeat(event, now)
            case RecordSeen():
                return self._on_record(event, now)
            case RecordVanished():
                return self._on_vanished(event, now)
            case BusLost():
                self._is_deaf = True
                return []
            case BusRestored():
                self._is_deaf = False
                self._listen_anew(now)
                return []
            case Tick():
                return self._on_tick(now)

    def healths(self) -> dict[str, Health]:
        """The health of each known process. A process whose record vanished is not known
        any more.
        """
        return {instance_id: i.health for instance_id, i in sorted(self._instances.items())}

    def check_invariants(self) -> None:
        assert len(self._tombstones) <= MAX_TOMBSTONES
        for instance_id, instance in self._instances.items():
            is_buried = (instance_id, instance.incarnation) in self._tombstones
            assert not is_buried, f"{instance_id} lives on under a final incarnation"

    def _on_record(self, event: RecordSeen, now: float) -> list[HealthChanged]:
        if (event.instance_id, event.incarnation) in self._tombstones:
            return []
        known = self._instances.get(event.instance_id)
        changes = []
        if known is not None:
            if known.incarnation == event.incarnation:
                return self._revived(event, known, now)
            self._bury(event.instance_id, known.incarnation)
            if known.health is not Health.DEAD:
                changes.append(self._change(event.instance_id, known, Health.DEAD, "replaced", now))
        self._instances[event.instance_id] = instance = _Instance(
            event.incarnation, event.service, now
        )
        changes.append(
            HealthChanged(
                event.instance_id, event.incarnation, event.service, None, instance.health,
                "registered"
            )
        )  # fmt: skip
        return changes

    def _revived(self, event: RecordSeen, known: _Instance, now: float) -> list[HealthChanged]:
        """The incarnation was cut off from the bus, counted as dead, and has registered again
        (F19).
        """
        if known.health is not Health.DEAD:
            return []
        known.heard_at = now
        return [self._change(event.instance_id, known, Health.HEALTHY, "registered", now)]

    def _on_heartbeat(self, event: Heartbeat, now: float) -> list[HealthChanged]:
        instance = self._instances.get(event.instance_id)
        if instance is None or instance.incarnation != event.incarnation:
            return []
        if instance.health is Health.DEAD:
            return []
        instance.heard_at = now
        if instance.health is Health.HEALTHY:
            return []
        return [self._change(event.instance_id, instance, Health.HEALTHY, "heartbeat_resumed", now)]

    def _on_vanished(self, event: RecordVanished, now: float) -> list[HealthChanged]:
        instance = self._instances.get(event.instance_id)
        if instance is None:
            return []
        was_dead = instance.health is Health.DEAD
        cause = "lease_expired" if event.is_lease_end else "deregistered"
        change = self._change(event.instance_id, instance, Health.DEAD, cause, now)
        del self._instances[event.instance_id]
        if not event.is_lease_end:
            self._bury(event.instance_id, instance.incarnation)
        return [] if was_dead else [change]

    def _on_tick(self, now: float) -> list[HealthChanged]:
        before, self._ticked_at = self._ticked_at, now
        if before is not None and now - before > self.lease_s:
            self._listen_anew(now)  # this process was paused, so heartbeats wait unread
        if self._is_deaf:
            return []
        return [c for i in sorted(self._instances) if (c := self._judge(i, now))]

    def _judge(self, instance_id: str, now: float) -> HealthChanged | None:
        instance = self._instances[instance_id]
        leases = (now - instance.heard_at) / self.lease_s
        if leases > DEAD_AFTER_LEASES and instance.health is not Health.DEAD:
            return self._change(instance_id, instance, Health.DEAD, "heartbeat_missed", now)
        if leases > SUSPECT_AFTER_LEASES and instance.health is Health.HEALTHY:
            return self._change(instance_id, instance, Health.SUSPECT, "heartbeat_missed", now)
        return None

    def _listen_anew(self, now: float) -> None:
        for instance in self._instances.values():
            instance.heard_at = now

    def _change(
        self, instance_id: str, instance: _Instance, after: Health, cause: str, now: float
    ) -> HealthChanged:
        before, instance.health = instance.health, after
        return HealthChanged(
            instance_id,
            instance.incarnation,
            instance.service,
            before,
            after,
            cause,
            max(0.0, now - instance.heard_at),
        )

    def _bury(self, instance_id: str, incarnation: int) -> None:
        self._tombstones[(instance_id, incarnation)] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
