"""One instance as placement sees it.

Placement ranks the instances that may serve a request. For each instance it knows the record in the
registry, the health and the last reported load. It also knows the requests that are planned for the
instance and that no report mentions yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.health.fault_levels import FaultJudged
from pdmesh.core.health.liveness import Health
from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource
from pdmesh.core.model import Role
from pdmesh.core.placement.predictor import PromptTokens

# Two decaying sums of an instance's compute time. After this time, a second of compute counts 1/e.
USED_S: Final = 60.0  # for the sum that measures how much of its time the instance is used
BALANCE_S: Final = 300.0  # for the sum by which the work of instances is compared
_USED_POWER: Final = round(BALANCE_S / USED_S)
_SPEED_WEIGHT: Final = 0.05
_SPEED_DRIFT: Final = 0.002  # slowness drifts back to 1, because the kind's fit also adapts
_MOST_LOG_SPEED: Final = 1.4  # natural logarithm of a factor of four, slower or faster


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of an instance's record in the registry.

    Two instances may hand KV to each other if their `cell` is equal (S13).
    """

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
    excluded_sources: tuple[
        ExcludedSource, ...
    ] = ()  # the prefills that this decode ejects or avoids
    is_ready: bool = True  # False until it is connected to its peers
    revision: str = ""  # the assigned model, KV layout and transport, as one name
    fetches_from_peers: bool = False  # it fetches KV blocks from the host memory of other instances
    region: str = ""
    kv_region: str = ""  # the region that its KV stays in, or empty if its group spans regions
    takes_adapters: bool = False
    adapters: frozenset[str] = frozenset()  # digests of the loaded LoRA adapters
    takes_images: bool = False

    @property
    def cell(self) -> tuple[str, str]:
        return (self.group_id, f"{self.model_fingerprint}/{self.revision}/{self.kv_region}")


@dataclass(slots=True)
class RecentWork:
    """The recent compute seconds of an instance, as two sums that decay exponentially.

    The first sum decays to 1/e in `USED_S`, the second in `BALANCE_S`.
    """

    _used_s: float = 0.0
    _balance_s: float = 0.0
    _at: float = 0.0

    def at(self, now: float) -> tuple[float, float]:
        """Both sums at `now`. Calls are frequent, so only one exponential is computed."""
        left = math.exp((self._at - now) / BALANCE_S)
        return self._used_s * left**_USED_POWER, self._balance_s * left

    def add(self, seconds: float, now: float) -> None:
        used, balance = self.at(now)
        self._used_s, self._balance_s, self._at = used + seconds, balance + seconds, now


@dataclass(slots=True)
class Instance:
    """The state of one instance.

    `num_booked` counts the requests that are planned for the instance and that no report mentions
    yet. The backlog has all prompts that are planned for the instance and not computed yet.
    """

    identity: Identity
    health: Health = Health.HEALTHY
    fault: FaultJudged | None = None
    is_out_of_service: bool = False
    num_slots: int = 0
    num_slots_used: int = 0
    num_kv_blocks_free: int = 0
    is_draining: bool = False
    reported_at: float | None = None
    computed_s: float = 0.0  # the compute time of all its prompts so far, as it reported
    slowness: float = 1.0  # its time for a prompt, divided by the usual time of its kind
    id: str = field(init=False)
    kind: str = field(init=False)  # instances of one kind should take equally long for a prompt
    available_at: float = 0.0  # the predicted time at which the backlog is computed (S93)
    backlog_s: float = 0.0  # the predicted compute time of the backlog
    num_backlog_blocks: int = 0  # KV blocks of the backlog, to be computed or fetched
    num_prompts: int = 0  # the prompts in the backlog
    num_booked: int = 0
    num_booked_blocks: int = 0
    untimed: list[PromptTokens] = field(
        default_factory=list
    )  # computed prompts whose compute time is not reported yet
    recent: RecentWork = field(default_factory=RecentWork)

    def __post_init__(self) -> None:
        self.id = self.identity.instance_id
        self.kind = f"{self.identity.model_fingerprint}/{self.identity.role.value}"

    @property
    def is_usable(self) -> bool:
        is_going = self.is_draining or self.identity.is_draining
        is_there = self.health is Health.HEALTHY and self.identity.is_ready
        return is_there and not (is_going or self.is_ejected or self.is_out_of_service)

    @property
    def is_ejected(self) -> bool:
        """Whether the instance gets no requests because it is faulty (S34)."""
        return self.fault is not None and self.fault.ejects

    @property
    def is_decode(self) -> bool:
        return self.identity.role is Role.DECODE

    def used_slots(self) -> int:
        """The used slots of the last report, plus the booked requests."""
        return self.num_slots_used + self.num_booked

    def free_blocks(self) -> int:
        return max(0, self.num_kv_blocks_free - self.num_booked_blocks)

    @property
    def num_beside(self) -> int:
        """How many sequences decode on the instance now, and share its steps with a prompt."""
        if self.identity.role is Role.PREFILL:
            return 0
        return max(0, self.used_slots() - self.num_prompts)

    def wait_s(self, now: float, doubt: float) -> float:
        """The predicted seconds until the backlog is computed.

        The result is at least `doubt` times the backlog's whole compute time.
        """
        return max(self.available_at - now, doubt * self.backlog_s)

    def add_computed(self, seconds: float, now: float) -> None:
        self.computed_s += seconds
        self.recent.add(seconds, now)

    def adapt_slowness(self, seconds: float, expected_s: float) -> None:
        """Learn from prompts that took `seconds`, but usually take `expected_s` on this kind."""
        off = math.log(seconds / (expected_s * self.slowness))
        off = max(-_MOST_LOG_SPEED, min(_MOST_LOG_SPEED, off))
        log = math.log(self.slowness) * (1 - _SPEED_DRIFT) + _SPEED_WEIGHT * off
        self.slowness = math.exp(max(-_MOST_LOG_SPEED, min(_MOST_LOG_SPEED, log)))

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
        self.num_prompts += booking.has_prompt
        self.available_at = max(self.available_at, now) + booking.seconds

    def remove_backlog(self, booking: Booking, now: float) -> None:
        self.num_backlog_blocks -= booking.num_new_blocks
        self.num_prompts -= booking.has_prompt
        self.backlog_s = max(0.0, self.backlog_s - booking.seconds) if self.num_prompts else 0.0
        self.available_at = max(now, self.available_at - booking.seconds)

    def resume_backlog(self, now: float) -> None:
        """Predict `available_at` from now, because a prompt has ended and the next one begins."""
        self.available_at = now + self.backlog_s


@dataclass(slots=True)
class Booking:
    """One request on one instance. `seconds` and `num_new_blocks` are 0 for a decode."""

    instance: Instance
    num_blocks: int
    seconds: float  # predicted compute time of the prompt
    num_new_blocks: int  # KV blocks of the prompt that the instance must compute or fetch
    at: float
    num_fetched: int = 0  # tokens of the prompt whose KV other instances supply
    is_admitted: bool = False

    @property
    def has_prompt(self) -> bool:
        return self.seconds > 0
