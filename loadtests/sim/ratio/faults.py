"""A week of 10,000 devices at P/D-Serve's rate of 1 to 2 faults per week and 400 devices (S38).

First, the week is simulated for all machines, without requests. Devices fail by chance, and each
failure stops the device's instance. A spare machine loads the model and replaces the instance. The
broken machine becomes a spare when it is repaired. The result is a list of periods in which a group
lacks instances. Then requests are simulated in each of these periods, with the request core's own
migration. They are also simulated in groups that lack nothing, as a sample of the rest of the week.
The week's share of success combines both, weighted by time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from loadtests.sim.control import Control, count
from loadtests.sim.live import LiveMesh
from loadtests.sim.load import poisson
from loadtests.sim.ratio.loop import BALANCED, SHAPE
from pdmesh.core.model import Role

NUM_DEVICES: Final = 10_000
DEVICES_PER_INSTANCE: Final = 8
RATES: Final = (1.0, 2.0)  # faults per week and 400 devices: both ends of the paper's range
WEEK_S: Final = 7 * 86_400.0
SPLIT: Final = (3, 5)
NUM_SPARES: Final = 18  # spare machines, 1.4 % of all
NUM_GROUPS: Final = (NUM_DEVICES // DEVICES_PER_INSTANCE - NUM_SPARES) // sum(SPLIT)
REPAIR_S: Final = 86_400.0
RATE_PER_S: Final = 4.6  # requests per second of a group
E2E_SLO_S: Final = 20.0
LOAD_S: Final = 300.0  # a model of hundreds of billions of parameters loads within minutes
QUIET_S: Final = 900.0  # simulated seconds per run of a group that lacks nothing
_BEFORE_S: Final = 120.0  # simulated seconds before a fault
_AFTER_S: Final = 300.0  # simulated seconds after the last substitute begins to serve


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one instance. A spare machine is free `spare_after_s` later."""

    at_s: float
    role: Role
    spare_after_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """The time of a group around one loss, or around several losses that overlap.

    The times of the losses count from the episode's beginning.
    """

    group: int
    began_s: float
    length_s: float
    losses: tuple[Loss, ...]


@dataclass(slots=True)
class Machines:
    """The places of all machines. A place is (group, number). Prefills have the lowest numbers."""

    spares: deque[int]
    at: dict[int, tuple[int, int]]
    num_in_repair: int = 0
    most_in_repair: int = 0
    empty: deque[tuple[int, int, float]] = field(default_factory=deque)  # place, empty since
    losses: dict[int, list[Loss]] = field(default_factory=dict)  # by group; times of the week

    @classmethod
    def whole(cls) -> Machines:
        num = NUM_GROUPS * sum(SPLIT)
        at = {machine: divmod(machine, sum(SPLIT)) for machine in range(num)}
        return cls(deque(range(num, num + NUM_SPARES)), at)

    def fail(self, machine: int, now: float) -> bool:
        """Let a machine fail. Returns False if it was already in repair."""
        if machine in self.spares:
            self.spares.remove(machine)
        elif (place := self.at.pop(machine, None)) is not None:
            self.empty.append((*place, now))
        else:
            return False
        self.num_in_repair += 1
        self.most_in_repair = max(self.most_in_repair, self.num_in_repair)
        self._fill(now)
        return True

    def repair(self, machine: int, now: float) -> None:
        self.num_in_repair -= 1
        self.spares.append(machine)
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self.empty and self.spares:
            group, number, since = self.empty.popleft()
            self.at[self.spares.popleft()] = (group, number)
            role = Role.PREFILL if number < SPLIT[0] else Role.DECODE
            self.losses.setdefault(group, []).append(Loss(since, role, now - since))


def machines_of_a_week(per_week_and_400: float, seed: int) -> Machines:
    rng = random.Random(seed)
    machines, repairs = Machines.whole(), list[tuple[float, int]]()
    mean_s = WEEK_S / (per_week_and_400 * NUM_DEVICES / 400)
    now = rng.expovariate(1 / mean_s)
    while now < WEEK_S:
        while repairs and repairs[0][0] <= now:
            at, machine = heapq.heappop(repairs)
            machines.repair(machine, at)
        machine = rng.randrange(NUM_DEVICES) // DEVICES_PER_INSTANCE
        if machines.fail(machine, now):
            heapq.heappush(repairs, (now + REPAIR_S, machine))
        now += rng.expovariate(1 / mean_s)
    while machines.empty:
        at, machine = heapq.heappop(repairs)
        machines.repair(machine, at)
    return machines


def num_weeks_without_a_spare(per_week_and_400: float, num_weeks: int) -> int:
    """In how many of `num_weeks` weeks a group had to wait for a repair."""
    weeks = (machines_of_a_week(per_week_and_400, seed) for seed in range(num_weeks))
    return sum(any(x.spare_after_s for own in w.losses.values() for x in own) for w in weeks)


def episodes(machines: Machines) -> list[Episode]:
    return [e for group, own in sorted(machines.losses.items()) for e in _episodes(group, own)]


def _episodes(group: int, losses: Sequence[Loss]) -> Iterator[Episode]:
    """The episodes of a group. Losses whose times overlap are in one episode."""

    def end_of(loss: Loss) -> float:
        return loss.at_s + loss.spare_after_s + LOAD_S + _AFTER_S

    together: list[Loss] = []

    def made() -> Episode:
        began = together[0].at_s - _BEFORE_S
        own = tuple(Loss(x.at_s - began, x.role, x.spare_after_s) for x in together)
        return Episode(group, began, max(map(end_of, together)) - began, own)

    for loss in sorted(losses, key=lambda x: x.at_s):
        if together and loss.at_s - _BEFORE_S > max(map(end_of, together)):
            yield made()
            together = []
        together.append(loss)
    yield made()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of requests to one group for some time.

    `per_week_and_400` is the rate of faults. With 0, there was no fault.
    """

    per_week_and_400: float
    length_s: float
    num_faults: int
    num_requests: int
    num_failed: int
    num_late: int
    num_migrated: int
    stood_in_after_s: tuple[float, ...] = ()


def play(per_week_and_400: float, episode: Episode, seed: int) -> Outcome:
    """Simulate a group of 3 prefills and 5 decodes at 60 % of its capacity.

    A lost instance is the busiest of its role. It loses all of its requests (SIGKILL).
    """
    rng = random.Random(seed)
    mesh = LiveMesh(SHAPE, seed, load_s=LOAD_S, e2e_slo_s={"chat": E2E_SLO_S})
    mesh.set_up("chat-0", "chat", *SPLIT)
    length_s = episode.length_s
    control = Control(mesh, 10.0, length_s, has_ratio=False)
    control.start()
    for loss in episode.losses:
        mesh.clock.at(
            loss.at_s,
            partial(control.kill, "chat-0", loss.role, loss.spare_after_s),
        )
    mesh.play(poisson(rng, length_s, RATE_PER_S, lambda _: RATE_PER_S, lambda _: BALANCED, "chat"))
    mesh.clock.run()
    totals = mesh.totals
    assert count(control.log, "fault") == len(episode.losses)
    died = [e.at_s for e in control.log if e.kind == "fault"]
    stood_in = [e.at_s for e in control.log if e.kind == "substituted"]
    return Outcome(
        per_week_and_400,
        length_s,
        len(died),
        totals.num,
        totals.num_failed,
        totals.num_late,
        totals.num_migrated,
        tuple(up - down for down, up in zip(died, stood_in, strict=True)),
    )


def quiet(seed: int) -> Outcome:
    """Simulate a group that lacks nothing."""
    return play(0.0, Episode(0, 0.0, QUIET_S, ()), seed)


@dataclass(frozen=True, slots=True)
class Week:
    """The shares of requests that were answered, and answered in time, over the week.

    `in_time_around` is the share that was answered in time, only for the times around faults.
    """

    per_week_and_400: float
    num_faults: int
    time_around: float  # the share of all groups' time that is around faults
    answered: float
    in_time: float
    in_time_around: float


def week(per_week_and_400: float, around: Sequence[Outcome], without: Sequence[Outcome]) -> Week:
    share = sum(o.length_s for o in around) / (NUM_GROUPS * WEEK_S)

    def good(of: Sequence[Outcome], *, is_late_bad: bool) -> float:
        bad = sum(o.num_failed + is_late_bad * o.num_late for o in of)
        return 1 - bad / sum(o.num_requests for o in of)

    def mixed(*, is_late_bad: bool) -> float:
        near, far = good(around, is_late_bad=is_late_bad), good(without, is_late_bad=is_late_bad)
        return share * near + (1 - share) * far

    return Week(
        per_week_and_400,
        sum(o.num_faults for o in around),
        share,
        mixed(is_late_bad=False),
        mixed(is_late_bad=True),
        good(around, is_late_bad=True),
    )
