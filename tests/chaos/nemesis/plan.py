"""Draws the actions of the nemesis from a seed. The same seed gives the same plan for any mesh.

The nemesis is a random attacker of a mesh. A step has one to three overlapping faults, and
sometimes an operator's order. Limits keep a step within the faults that the mesh promises to
survive. A step hits at most two instances and one gateway, one instance is cordoned at a time, and
the store is not wiped while masters are hit. A new release needs room for all its instances besides
the old ones (docs/groups.md), so it comes only while no instance is cordoned.

Kinds of faults are drawn from a bag, which is refilled when it is empty. So all kinds are drawn
equally often. A drawn fault that would exceed a limit is skipped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tests.chaos.nemesis.actions import (
    Action,
    Apply,
    Cordon,
    Cut,
    DeviceFault,
    Fault,
    Freeze,
    Order,
    Outage,
    Rollback,
    Signal,
    Slow,
    Uncordon,
)

NUM_INSTANCES: Final = 8
INSTANCES: Final = tuple(f"instance-{i}" for i in range(NUM_INSTANCES))
GATEWAYS: Final = ("gateway-0", "gateway-1")
MASTERS: Final = ("master-scheduler", "master-scheduler-1")
HELPERS: Final = ("kv-cache-index", "health-monitor", "node-agent")
# the processes whose link to their server can be cut
LINKED: Final = (*MASTERS, *INSTANCES[:3], "kv-cache-index")
MAX_FAULTS: Final = 3
MAX_INSTANCES_HIT: Final = 2
_SPREAD_S: Final = 3.0  # the faults of a step begin within this time

# Groups use at most four of the eight instances, so that a new release has room for all of its
# instances.
_SHAPES: Final = {
    "2P:2D": "groups:\n  chat: {prefill: 2, decode: 2}\n",
    "3P:1D": "groups:\n  chat: {prefill: 3, decode: 1}\n",
    "1P:3D": "groups:\n  chat: {prefill: 1, decode: 3}\n",
    "1P:2D": "groups:\n  chat: {prefill: 1, decode: 2}\n",
    "two groups of 1P:1D": "groups:\n  chat: {count: 2, prefill: 1, decode: 1}\n",
    "1P:1D and two fusions": "groups:\n  chat: {prefill: 1, decode: 1}\n  lone: {fusion: 2}\n",
}
_ONE_IS_ENOUGH: Final = "scenarios:\n  default: {allow_single: true}\n"

_FAILPOINTS: Final = (
    ("prefill.computing=sigkill", 3, 40),
    ("prefill.layer=sigkill", 3, 60),
    ("prefill.staged=sigkill", 3, 40),
    ("decode.accepted=sigkill", 3, 40),
    ("decode.range=sigkill", 3, 60),
    ("decode.token=sigkill", 30, 600),
    ("decode.asking=drop", 3, 40),
    ("prefill.sending=corrupt", 3, 40),
    ("engine.step=hang", 20, 400),
)

# A function that draws one fault. Its second argument has the instances that may be hit.
Draw = Callable[[random.Random, Sequence[str]], Fault]


def _seconds(draw: random.Random) -> float:
    return round(draw.uniform(1.0, 6.0), 1)


def _failpoint(draw: random.Random) -> str:
    """A failpoint for the next incarnation, which may act in a later step. Empty in half of the
    cases.
    """
    point, least, most = draw.choice(_FAILPOINTS)
    at = draw.randint(least, most)
    return f"{point}@{at}" if draw.random() < 0.5 else ""


def _ended(targets: Sequence[str]) -> Draw:
    return lambda draw, _: Signal(draw.choice(targets), draw.choice(("SIGKILL", "SIGTERM")))


def _frozen(targets: Sequence[str]) -> Draw:
    return lambda draw, _: Freeze(draw.choice(targets), _seconds(draw))


def _cut(targets: Sequence[str]) -> Draw:
    return lambda draw, _: Cut(draw.choice(targets), _seconds(draw))


def _linked(draw: random.Random, instances: Sequence[str]) -> str:
    return draw.choice([name for name in instances if name in LINKED])


_FAULTS: Final[Sequence[Draw]] = (
    lambda draw, instances: Signal(draw.choice(instances), "SIGKILL", _failpoint(draw)),
    lambda draw, instances: Signal(draw.choice(instances), "SIGKILL", _failpoint(draw)),
    lambda draw, instances: Signal(draw.choice(instances), "SIGTERM"),
    lambda draw, instances: Signal(draw.choice(instances), "SIGKILL"),
    lambda draw, instances: Signal(draw.choice(instances), "SIGKILL"),
    lambda draw, instances: Freeze(draw.choice(instances), _seconds(draw)),
    lambda draw, instances: Freeze(draw.choice(instances), _seconds(draw)),
    lambda draw, instances: DeviceFault(draw.choice(instances), draw.randint(1, 5), _seconds(draw)),
    lambda draw, instances: DeviceFault(draw.choice(instances), draw.randint(2, 5), _seconds(draw)),
    lambda draw, instances: Slow(
        _linked(draw, instances), round(draw.uniform(0.02, 0.3), 2), _seconds(draw)
    ),
    lambda draw, instances: Cut(_linked(draw, instances), _seconds(draw)),
    _cut(MASTERS),
    _cut(["kv-cache-index"]),
    _ended(MASTERS),
    _ended(GATEWAYS),
    _ended(HELPERS),
    _frozen(MASTERS),
    _frozen(GATEWAYS),
    _frozen(HELPERS),
    _frozen(["nats"]),
    _frozen(["valkey"]),
    lambda draw, _: Outage("nats", _seconds(draw)),
    lambda draw, _: Outage("nats", 0.5, is_wiped=True),
    lambda draw, _: Outage("valkey", _seconds(draw), is_wiped=draw.random() < 0.5),
)

OrderKind = Literal["apply", "rollback", "drain", "cordon", "none"]
_ORDERS: Final[tuple[OrderKind, ...]] = (
    "apply", "apply", "apply", "rollback", "drain", "cordon", "none", "none",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """The actions of a step. Each action has its delay after the beginning of the step."""

    number: int
    actions: tuple[tuple[float, Action], ...]

    @property
    def faults(self) -> list[Fault]:
        return [action for _, action in self.actions if isinstance(action, Fault)]


def desired_text(shape: str, release: int) -> str:
    return f'services:\n  default: {{release: "{release}"}}\n{_ONE_IS_ENOUGH}{_SHAPES[shape]}'


FIRST: Final = desired_text("2P:2D", 1)


def steps(seed: int) -> Iterator[Step]:
    """An endless sequence of steps from a seed."""
    return Plan(seed).steps()


class Plan:
    """Draws steps one after another, and tracks which instance is cordoned."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"nemesis {seed}")
        self._faults: list[Draw] = []
        self._orders: list[OrderKind] = []
        self._cordoned: Cordon | None = None
        self._release_at = 0
        self._release = 1

    def steps(self) -> Iterator[Step]:
        for number in itertools.count(1):
            orders = self._draw_orders(number)
            faults = self._draw_faults(
                {order.target for order in orders if isinstance(order, Cordon)}
            )
            begins = sorted(self._begins() for _ in orders)
            actions: list[tuple[float, Action]] = list(zip(begins, orders, strict=True))
            actions += [(self._begins(), fault) for fault in faults]
            yield Step(number, tuple(sorted(actions, key=lambda each: each[0])))

    def _begins(self) -> float:
        return round(self._random.uniform(0.0, _SPREAD_S), 1)

    # --- an operator's orders --------------------------------------------------------------------

    def _draw_orders(self, number: int) -> list[Order]:
        if self._cordoned is not None and number >= self._release_at:
            ended, self._cordoned = self._cordoned, None
            return [Uncordon(ended.target)]
        self._orders = self._orders or self._random.sample(_ORDERS, len(_ORDERS))
        match self._orders.pop():
            case "apply":  # if two, the second comes before the groups match the first
                num = self._random.choice((1, 1, 2))
                return [self._draw_desired() for _ in range(num)]
            case "rollback" if self._cordoned is None:  # a rollback may restore another release
                return [Rollback()]
            case "drain":
                return self._draw_cordon("drain", number)
            case "cordon":
                return self._draw_cordon("cordon", number)
            case _:
                return []

    def _draw_desired(self) -> Apply:
        """A desired state, sometimes with a new release, which replaces every instance."""
        if self._random.random() < 0.4 and self._cordoned is None:
            self._release += 1
        shape = self._random.choice(sorted(_SHAPES))
        return Apply(f"{shape}, release {self._release}", desired_text(shape, self._release))

    def _draw_cordon(self, kind: Literal["drain", "cordon"], number: int) -> list[Order]:
        if self._cordoned is not None:
            return []
        self._cordoned = Cordon(self._random.choice(INSTANCES), kind)
        self._release_at = number + self._random.randint(1, 2)
        return [self._cordoned]

    # --- faults ----------------------------------------------------------------------------------

    def _draw_faults(self, spared: set[str]) -> list[Fault]:
        num = self._random.choices((1, 2, MAX_FAULTS), weights=(2, 4, 4))[0]
        cordoned = {self._cordoned.target} if self._cordoned is not None else set()
        instances = [i for i in INSTANCES if i not in spared | cordoned]
        drawn: list[Fault] = []
        for _ in range(num):
            self._faults = self._faults or self._random.sample(_FAULTS, len(_FAULTS))
            fault = self._faults.pop()(self._random, instances)
            if _goes_with(fault, drawn):
                drawn.append(fault)
        return drawn


def _goes_with(fault: Fault, drawn: list[Fault]) -> bool:
    """Whether the step stays within the limits if `fault` is added to the drawn faults."""
    together = [*drawn, fault]
    targets = [each.target for each in together]
    is_wiped = any(isinstance(each, Outage) and each.is_wiped for each in together)
    return (
        len(set(targets)) == len(targets)
        and sum(t in INSTANCES for t in targets) <= MAX_INSTANCES_HIT
        and sum(t in GATEWAYS for t in targets) <= 1
        and not (is_wiped and any(t in MASTERS for t in targets))
    )
