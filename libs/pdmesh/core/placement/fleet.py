"""The master's knowledge of all instances, from which it plans where requests go.

For each instance, the master knows the record in the registry, the health, and the load reports. A
load report is already old when it arrives. So the requests that the master has planned for an
instance, its bookings, are added to its reported load until a report names them (see
`reservations.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdmesh.core.health.fault_levels import FaultJudged
from pdmesh.core.health.liveness import Health
from pdmesh.core.placement.chat_affinity import ChatAffinity
from pdmesh.core.placement.instance import Identity, Instance
from pdmesh.core.placement.predictor import LatencyPredictor, PromptTokens
from pdmesh.core.placement.reservations import Reservations

_MAX_JUDGED = 65_536
_MAX_UNTIMED = 64  # computed prompts of one instance whose compute time is not reported yet
_MANY_OBSERVED = 50  # spans of a kind before its instances are compared with each other


@dataclass(frozen=True, slots=True)
class InstanceRecorded:
    identity: Identity


@dataclass(frozen=True, slots=True)
class InstanceUnrecorded:
    instance_id: str


@dataclass(frozen=True, slots=True)
class HealthJudged:
    """The health-monitor's verdict on one incarnation, one life of an instance."""

    instance_id: str
    incarnation: int
    health: Health


@dataclass(frozen=True, slots=True)
class FaultForgotten:
    instance_id: str


@dataclass(frozen=True, slots=True)
class OutOfServiceSeen:
    """The ids of the instances that get no requests.

    Each was ejected for a fault or cordoned by an operator.
    """

    instance_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class HealthMonitorLost:
    """No health-monitor is running, so the verdicts of the last one no longer count."""


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """A prompt that an instance has computed.

    `num_tokens` is 0 if the prompt was given up, or if the entry reports only a time.

    An instance times a span of prompts together, because they share steps. `seconds` is 0 unless
    the prompt is the last of its span. For the last prompt, `seconds` is the compute time of the
    span without waiting, and the prompts of the span ended in `num_steps` different steps. On
    average, `num_beside` sequences decoded in the same steps. None means that the number is
    unknown.
    """

    request_id: str
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    num_steps: int = 1
    num_beside: float | None = None


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
    InstanceRecorded
    | InstanceUnrecorded
    | HealthJudged
    | FaultJudged
    | FaultForgotten
    | OutOfServiceSeen
    | HealthMonitorLost
    | LoadReported
)


@dataclass(slots=True)
class Fleet:
    """All instances, with their bookings and their prediction of prefill times.

    Only `handle` changes the instances, except for bookings.
    """

    instances: dict[str, Instance] = field(default_factory=dict)
    predictor: LatencyPredictor = field(default_factory=LatencyPredictor)
    reservations: Reservations = field(default_factory=Reservations)
    chats: ChatAffinity = field(default_factory=ChatAffinity)
    version: int = 0  # grows whenever the set of possible candidates may have changed
    # Verdicts by instance id, because a verdict may come before the instance's record.
    _judged: dict[str, HealthJudged] = field(default_factory=dict)
    _faults: dict[str, FaultJudged] = field(default_factory=dict)
    _out_of_service: frozenset[str] = frozenset()

    def handle(self, event: Event, now: float) -> None:
        match event:
            case LoadReported():
                self._on_load(event, now)
                return
            case InstanceRecorded():
                self._on_record(event.identity)
            case InstanceUnrecorded():
                self._forget(event.instance_id)
                self._judged.pop(event.instance_id, None)
                self._faults.pop(event.instance_id, None)
            case HealthJudged():
                self._on_health(event)
            case FaultJudged():
                self._on_fault(event)
            case FaultForgotten():
                self._on_fault_forgotten(event)
            case OutOfServiceSeen():
                self._on_out_of_service(event)
            case HealthMonitorLost():
                self._trust_again()
        self.version += 1

    def settle(self, now: float) -> None:
        """Drop bookings that no report has named in time."""
        self.reservations.expire(now)

    def longest_by_scenario(self, matches: Mapping[str, int]) -> dict[str, int]:
        """The longest cached prefix of a prompt, among the usable instances of each scenario.

        Prefixes are measured in blocks. `matches` has the prefix of each instance, by id.
        """
        longest: dict[str, int] = {}
        for instance_id, num_blocks in matches.items():
            instance = self.instances.get(instance_id)
            if instance is not None and instance.is_usable:
                scenario = instance.identity.scenario
                longest[scenario] = max(num_blocks, longest.get(scenario, 0))
        return longest

    def check_invariants(self) -> None:
        for instance_id, instance in self.instances.items():
            assert instance.identity.instance_id == instance_id
            bookings = self.reservations.of(instance)
            open_ones = [b for b in bookings if not b.is_admitted]
            assert instance.num_booked == len(open_ones)
            assert instance.num_booked_blocks == sum(b.num_blocks for b in open_ones)
            assert instance.num_backlog_blocks == sum(b.num_new_blocks for b in bookings)
            assert instance.num_prompts == sum(b.has_prompt for b in bookings)

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
        instance.is_out_of_service = identity.instance_id in self._out_of_service
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

    def _on_out_of_service(self, event: OutOfServiceSeen) -> None:
        self._out_of_service = event.instance_ids
        for instance in self.instances.values():
            instance.is_out_of_service = instance.id in event.instance_ids

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
        self.chats.admitted(instance.id, event.admitted, is_decode=instance.is_decode)
        for prefill in event.computed:
            self._on_computed(instance, prefill, now)
        if not event.num_slots_used and instance.num_prompts:
            self.reservations.idle(instance, now)

    def _on_computed(self, instance: Instance, prefill: PrefillComputed, now: float) -> None:
        booking = self.reservations.computed(prefill.request_id, now)
        span = instance.untimed
        if prefill.num_tokens:
            num_fetched = min(booking.num_fetched, prefill.num_cached_tokens) if booking else 0
            span.append(PromptTokens(prefill.num_tokens, prefill.num_cached_tokens, num_fetched))
        if prefill.seconds > 0 and span:
            self._learn(instance, span, prefill)
            instance.add_computed(prefill.seconds, now)
            span.clear()
        elif len(span) >= _MAX_UNTIMED:
            span.clear()

    def _learn(
        self, instance: Instance, prompts: Sequence[PromptTokens], last: PrefillComputed
    ) -> None:
        seconds, num_steps = last.seconds, max(1, last.num_steps)
        num_beside = instance.num_beside if last.num_beside is None else last.num_beside
        fit = self.predictor.fit(instance.kind)
        expected_s = fit.span_s(prompts, num_steps, num_beside)
        fit.observe_span(prompts, seconds / instance.slowness, num_steps, num_beside)
        if fit.num_observed > _MANY_OBSERVED:
            instance.adapt_slowness(seconds, expected_s)
