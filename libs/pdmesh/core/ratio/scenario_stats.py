"""Measures each scenario's request times and the throughput of its instances (S2, S138).

T_p is the time from a prefill's acceptance to token 1. T_d is the time from a decode's acceptance
to the last token, and xi is the part of T_d for the KV transfer. Times are exponentially weighted
means over a scenario's requests. The request rate is measured over a window. T_p and T_d do not
include the wait for an acceptance. The capacity of n instances with b slots each is n b / T, if T
is the time for which a request uses a slot. Phi is the resulting throughput per instance.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Instance
from pdmesh.core.ratio.throughput import Phi

MAX_SCENARIOS: Final = 256
_WEIGHT: Final = 0.05  # the weight of the newest request, after the first twenty
_WINDOW_S: Final = 30.0
_MAX_ENDS: Final = 100_000  # per scenario and window; with more requests, the rate is too low


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One completed request. Times are in seconds.

    `queue_s` is the time from submission until a prefill accepted the request, and `ttft_s` the
    time from submission to token 1. `decode_queue_s` is the time from token 1 until a decode
    accepted.
    """

    scenario: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    transfer_s: float
    decode_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleSlots:
    """The usable instances of one role: n instances with b slots each, n b together.

    A decode also accepts a few requests that wait for a place (its MAX_WAITING). Their slots are
    included in b, and their wait in T_d.
    """

    num_instances: int = 0
    num_slots: int = 0


@dataclass(slots=True)
class ScenarioStats:
    """The means of one scenario in seconds and shares, over `num` answered requests.

    The whole time of a request is E2E = queue + T_p + decode_queue + T_d.
    """

    num: int = 0
    queue: float = 0.0
    decode_queue: float = 0.0
    t_p: float = 0.0
    t_d: float = 0.0
    xi: float = 0.0
    tpot: float = 0.0
    ttft: float = 0.0
    hit_share: float = 0.0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_ENDS))

    @property
    def t_p_share(self) -> float:
        """The share of T_p in T_p + T_d."""
        total = self.t_p + self.t_d
        return self.t_p / total if total else 0.0

    def add(self, request: RequestSample) -> None:
        self.num += 1
        weight = max(_WEIGHT, 1 / self.num)
        decode_s = max(0.0, request.e2e_s - request.ttft_s - request.decode_queue_s)
        self.queue += weight * (request.queue_s - self.queue)
        self.decode_queue += weight * (request.decode_queue_s - self.decode_queue)
        self.t_p += weight * (max(0.0, request.ttft_s - request.queue_s) - self.t_p)
        self.t_d += weight * (decode_s - self.t_d)
        self.xi += weight * (request.transfer_s - self.xi)
        self.ttft += weight * (request.ttft_s - self.ttft)
        if request.num_output_tokens > 1:
            per_token = max(0.0, decode_s - request.transfer_s) / (request.num_output_tokens - 1)
            self.tpot += weight * (per_token - self.tpot)
        if request.num_prompt_tokens:
            share = request.num_cached_tokens / request.num_prompt_tokens
            self.hit_share += weight * (share - self.hit_share)

    def came(self, now: float) -> None:
        """Count a request that has ended, answered or not."""
        self._ends.append(now)

    def rate_per_s(self, now: float) -> float:
        """The arrival rate I_t in requests per second, over the window.

        Requests are counted when they end, and refused requests are included.
        """
        while self._ends and self._ends[0] < now - _WINDOW_S:
            self._ends.popleft()
        return len(self._ends) / _WINDOW_S


@dataclass(slots=True)
class Scenarios:
    """Stats by scenario.

    If there are too many scenarios, the one that has had no request for longest is forgotten.
    """

    _stats: OrderedDict[str, ScenarioStats] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._stats)

    def handle(self, request: RequestSample, now: float) -> None:
        """Count a request that was answered."""
        stats = self._of(request.scenario)
        stats.add(request)
        stats.came(now)

    def unanswered(self, scenario: str, now: float) -> None:
        """Count a request that was refused, failed or given up, and so has no times."""
        if scenario in self._stats:  # ignore names that no instance ever served
            self._of(scenario).came(now)

    def _of(self, scenario: str) -> ScenarioStats:
        stats = self._stats.get(scenario)
        if stats is None:
            stats = self._stats[scenario] = ScenarioStats()
        self._stats.move_to_end(scenario)
        while len(self._stats) > MAX_SCENARIOS:
            self._stats.popitem(last=False)
        return stats

    def items(self) -> list[tuple[str, ScenarioStats]]:
        return sorted(self._stats.items())

    def phi(self, scenario: str, instances: Iterable[Instance], now: float) -> Phi:
        """The throughput per instance, where n b counts the slots of a role's usable instances."""
        stats = self._stats.get(scenario)
        if stats is None:  # no instance ever served this name
            return Phi(0.0, math.inf, math.inf, 0)
        prefills, decodes = slots_by_role(scenario, instances).values()
        prefill = prefills.num_slots / stats.t_p if stats.t_p else math.inf
        decode = decodes.num_slots / stats.t_d if stats.t_d else math.inf
        count = prefills.num_instances + decodes.num_instances
        return Phi(stats.rate_per_s(now), prefill, decode, count)


def slots_by_role(scenario: str, instances: Iterable[Instance]) -> dict[Role, RoleSlots]:
    """The slots of the scenario's usable prefills, then of its decodes."""
    found: dict[Role, list[int]] = {Role.PREFILL: [], Role.DECODE: []}
    for instance in instances:
        role = instance.identity.role
        if instance.identity.scenario == scenario and role in found and instance.is_usable:
            found[role].append(instance.num_slots)
    return {role: RoleSlots(len(slots), sum(slots)) for role, slots in found.items()}
