"""Decides which instance is faulty, at which level, and whether the level's action is carried out
(S33, S34).

Other parts of the mesh report signals against an instance. A signal is a proof or a suspicion. One
proof is enough: the instance reports that its engine hangs, or the driver reports that the device
is gone. Suspicions count only if two sources agree for a while. A verdict stays until no signal has
supported it for a while. A verdict applies to one incarnation, that is, one life of the instance.
`ejection_cap` then protects the fleet from wrong verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.health.ejection_cap import EjectionCap, EjectionLimits
from pdmesh.core.health.fault_levels import (
    EJECTS_FROM,
    RESPONSES,
    FaultAction,
    Level,
)
from pdmesh.core.model import Tick

RESTARTED_IN_VAIN = "RESTARTED_IN_VAIN"
CRASH_LOOP = "CRASH_LOOP"


@dataclass(frozen=True, slots=True)
class Signal:
    """One piece of evidence against an instance. `level` is the fault's level if the signal is
    true.
    """

    source: str
    reason: str
    level: Level
    is_proof: bool = False
    # A signal that differs only in a number in `detail` is not a new signal.
    detail: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    instance_id: str
    incarnation: int
    group_id: str
    role: str
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class InstanceGone:
    """The instance's record is gone. `is_crash` means that the instance did not deregister."""

    instance_id: str
    is_crash: bool


@dataclass(frozen=True, slots=True)
class SignalsHeard:
    """All signals that `teller`, a part of the mesh, has against this incarnation now.

    They replace the teller's earlier signals, and expire after `ttl_s`.
    """

    teller: str
    instance_id: str
    incarnation: int
    signals: tuple[Signal, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Healed:
    """An operator says that the instance is well.

    Its past is forgotten, but present signals still count.
    """

    instance_id: str


@dataclass(frozen=True, slots=True)
class SignalsLost:
    """No signal can arrive now. Until `SignalsRestored`, silence means nothing."""


@dataclass(frozen=True, slots=True)
class SignalsRestored:
    pass


Event = InstanceSeen | InstanceGone | Healed | SignalsHeard | SignalsLost | SignalsRestored | Tick


@dataclass(frozen=True, slots=True)
class Judged:
    """A judgement to announce. The action is carried out if `held_back` is empty."""

    instance_id: str
    incarnation: int
    node_id: str
    level: Level
    action: FaultAction
    signals: tuple[Signal, ...]
    since: float
    held_back: str = ""


@dataclass(frozen=True, slots=True)
class JudgePolicy(EjectionLimits):
    """Times in seconds."""

    quorum: int = 2  # how many sources must agree if none has a proof
    confirm_s: float = 2.0
    clear_s: float = 10.0
    # After this many restarts within `restart_window_s`, another restart does not help.
    max_restarts: int = 3
    restart_window_s: float = 600.0
    max_crashes: int = 5  # crashes in a row, each within `stable_s` of its process's start
    stable_s: float = 30.0


@dataclass(slots=True)
class _Told:
    signals: tuple[Signal, ...]
    until: float


@dataclass(slots=True)
class _Instance:
    seen: InstanceSeen
    seen_at: float
    told: dict[str, _Told] = field(default_factory=dict)
    level: Level = Level.WELL
    since: float = 0.0
    worse_since: float | None = None
    better_since: float | None = None
    signals: tuple[Signal, ...] = ()
    announced: Judged | None = None

    @property
    def instance_id(self) -> str:
        return self.seen.instance_id

    @property
    def peers(self) -> tuple[str, str]:
        return self.seen.group_id, self.seen.role

    @property
    def is_ejectable(self) -> bool:
        return self.level >= EJECTS_FROM

    @property
    def has_proof(self) -> bool:
        return any(s.is_proof and s.level >= EJECTS_FROM for s in self.signals)


@dataclass(slots=True)
class _Past:
    """The history of an instance over all its incarnations."""

    restarts: list[float] = field(default_factory=list)
    num_crashes: int = 0
    heard_at: float = 0.0


_MAX_PASTS = 4096


@dataclass(slots=True)
class FaultJudge:
    """The judge of all instances.

    Only `handle` changes it, and returns the judgements to announce.
    """

    policy: JudgePolicy = field(default_factory=JudgePolicy)
    _instances: dict[str, _Instance] = field(default_factory=dict)
    _pasts: dict[str, _Past] = field(default_factory=dict)
    _is_deaf: bool = False
    _cap: EjectionCap = field(init=False)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._cap = EjectionCap(self.policy)

    @recorded
    def handle(self, event: Event, now: float) -> list[Judged]:
        match event:
            case SignalsHeard():
                self._on_signals(event, now)
            case InstanceSeen():
                self._on_seen(event, now)
            case InstanceGone():
                self._on_gone(event, now)
            case Healed(instance_id):
                self._on_healed(instance_id, now)
            case SignalsLost():
                self._is_deaf = True
            case SignalsRestored():
                self._is_deaf = False
                self._renew_all(now)
            case Tick():
                return [] if self._is_deaf else self._judge_all(now)
        return []

    def current(self) -> list[Judged]:
        """The last announcement about each instance that is not well."""
        found = (i.announced for _, i in sorted(self._instances.items()))
        return [j for j in found if j is not None and j.level is not Level.WELL]

    def check_invariants(self) -> None:
        for instance in self._instances.values():
            if instance.is_ejectable and instance.announced and not instance.announced.held_back:
                assert instance.instance_id in self._cap.out(instance.peers)
        for instance in self._instances.values():
            if instance.level > Level.TRANSIENT:
                assert instance.signals, "a verdict needs a reason"

    # -- events -----------------------------------------------------------------------------------

    def _on_seen(self, event: InstanceSeen, now: float) -> None:
        known = self._instances.get(event.instance_id)
        if known is not None and known.seen.incarnation == event.incarnation:
            known.seen = event
            return
        if known is not None:  # a new incarnation came before the old one's lease ended
            self._on_gone(InstanceGone(event.instance_id, is_crash=True), now)
        self._instances[event.instance_id] = _Instance(event, now)

    def _on_gone(self, event: InstanceGone, now: float) -> None:
        instance = self._instances.pop(event.instance_id, None)
        if instance is None:
            return
        past = self._past(event.instance_id, now)
        own = (s for told in instance.told.values() for s in told.signals)
        if not instance.is_ejectable and any(s.is_proof and s.level is Level.PROCESS for s in own):
            past.restarts.append(now)  # the instance ended itself before we judged it
        was_short = now - instance.seen_at < self.policy.stable_s
        if event.is_crash and not instance.is_ejectable:
            past.num_crashes = past.num_crashes + 1 if was_short else 1

    def _on_healed(self, instance_id: str, now: float) -> None:
        self._pasts.pop(instance_id, None)
        if (instance := self._instances.get(instance_id)) is not None:
            instance.seen_at = now
            self._set_level(instance, Level.WELL, (), now)

    def _on_signals(self, event: SignalsHeard, now: float) -> None:
        instance = self._instances.get(event.instance_id)
        if instance is None or instance.seen.incarnation != event.incarnation:
            return
        if event.signals:
            instance.told[event.teller] = _Told(event.signals, now + event.ttl_s)
        else:
            instance.told.pop(event.teller, None)

    def _renew_all(self, now: float) -> None:
        """Extend the earlier signals until their tellers have had time to repeat them."""
        for instance in self._instances.values():
            for told in instance.told.values():
                told.until = max(told.until, now + self.policy.clear_s)

    # -- judgement --------------------------------------------------------------------------------

    def _judge_all(self, now: float) -> list[Judged]:
        for instance in self._instances.values():
            self._weigh(instance, now)
        decision = self._cap.rule(self._instances.values(), now)
        for instance_id in decision.ejected:
            self._note_restart(self._instances[instance_id], now)
        changes = []
        for instance_id, instance in sorted(self._instances.items()):
            judged = self._verdict(instance, decision.held_back.get(instance_id, ""))
            if judged != instance.announced:
                is_news = instance.announced is not None or judged.level is not Level.WELL
                instance.announced = judged
                if is_news:
                    changes.append(judged)
        return changes

    def _weigh(self, instance: _Instance, now: float) -> None:
        for teller in [t for t, told in instance.told.items() if told.until <= now]:
            del instance.told[teller]
        signals = self._signals(instance, now)
        level, is_proven = self._level(signals)
        if level > instance.level:
            instance.better_since = None
            instance.worse_since = now if instance.worse_since is None else instance.worse_since
            if is_proven or now - instance.worse_since >= self.policy.confirm_s:
                self._set_level(instance, level, signals, now)
        elif level < instance.level:
            instance.worse_since = None
            instance.better_since = now if instance.better_since is None else instance.better_since
            if now - instance.better_since >= self.policy.clear_s:
                self._set_level(instance, level, signals, now)
        else:
            instance.worse_since = instance.better_since = None
            instance.signals = signals

    def _set_level(
        self, instance: _Instance, level: Level, signals: tuple[Signal, ...], now: float
    ) -> None:
        instance.level, instance.since, instance.signals = level, now, signals
        instance.worse_since = instance.better_since = None

    def _signals(self, instance: _Instance, now: float) -> tuple[Signal, ...]:
        told = [s for _, t in sorted(instance.told.items()) for s in t.signals]
        past = self._pasts.get(instance.seen.instance_id)
        if past is not None:
            told += self._from_past(past, instance, now)
        return tuple(sorted(set(told), key=lambda s: (-s.level, s.source, s.reason, s.detail)))

    def _from_past(self, past: _Past, instance: _Instance, now: float) -> list[Signal]:
        policy = self.policy
        past.restarts = [at for at in past.restarts if now - at < policy.restart_window_s]
        if past.num_crashes and now - instance.seen_at >= policy.stable_s:
            past.num_crashes = 0
        found = []
        if len(past.restarts) >= policy.max_restarts:
            detail = f"restarted {len(past.restarts)} times"
            found.append(Signal("crashes", RESTARTED_IN_VAIN, Level.INSTANCE, True, detail))
        if past.num_crashes >= policy.max_crashes:
            detail = f"{past.num_crashes} crashes in a row"
            found.append(Signal("crashes", CRASH_LOOP, Level.INSTANCE, False, detail))
        return found

    def _level(self, signals: Sequence[Signal]) -> tuple[Level, bool]:
        """The worst level that a proof or a quorum supports, and whether it is valid at once.

        A lone suspicion gives only L1.
        """
        for level in sorted(Level, reverse=True):
            if level <= Level.TRANSIENT:
                break
            so_bad = [s for s in signals if s.level >= level]
            if any(s.is_proof for s in so_bad):
                return level, True
            if len({s.source for s in so_bad}) >= self.policy.quorum:
                return level, False
        is_any = any(s.level > Level.WELL for s in signals)
        return (Level.TRANSIENT if is_any else Level.WELL), True

    def _verdict(self, instance: _Instance, held_back: str) -> Judged:
        seen = instance.seen
        return Judged(
            seen.instance_id,
            seen.incarnation,
            seen.node_id,
            instance.level,
            RESPONSES[instance.level].action,
            instance.signals,
            instance.since,
            held_back,
        )

    def _note_restart(self, instance: _Instance, now: float) -> None:
        if instance.level is Level.PROCESS:
            self._past(instance.seen.instance_id, now).restarts.append(now)

    def _past(self, instance_id: str, now: float) -> _Past:
        past = self._pasts.pop(instance_id, None) or _Past()
        past.heard_at = now
        self._pasts[instance_id] = past
        if len(self._pasts) > _MAX_PASTS:
            del self._pasts[next(iter(self._pasts))]
        return past
