"""Fakes for a runner of pooling calls.

Their instances answer batches as a test's script says.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pdmesh.core.model import PeerId
from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.core.request.events import Event, LegAccepted, LegFinished, RequestLimits
from pdmesh.core.request.poison import PoisonBook
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.slo import Slos
from pdmesh.errors import Draining
from pdmesh.services.gateway.access.access_control import RateLimited
from pdmesh.services.gateway.pooling.spec import PoolingSpec
from pdmesh.services.gateway.routing.pooling_fleet import PoolingModel, PoolingNeeds
from pdmesh.v1.instance_service_pb2 import Command, Pooled, SessionEvent

NUM_VALUES = 4
MODEL = PoolingModel(
    "vectors", PoolingFacts(frozenset({PoolingTask.EMBED}), NUM_VALUES), "new", 512
)
LIMITS = RequestLimits(deadline_s=60, ttft_s=5, answer_s=30)


def spec_of(*sizes: int, model: PoolingModel = MODEL) -> PoolingSpec:
    inputs = tuple(array("I", [place + 1] * size) for place, size in enumerate(sizes))
    return PoolingSpec("embeddings", model, PoolingTask.EMBED, inputs)


# The events of an instance about a batch, in order. No further event follows.
Said = Sequence[tuple[Event, SessionEvent | None]]
Script = Callable[[str, Any, int], Said]


def answered(pool: Any, key: int, value: float = 1.0) -> Said:
    values = np.full(NUM_VALUES * len(pool.inputs), value, dtype="<f4").tobytes()
    done = SessionEvent(key=key, pooled=Pooled(num_values=NUM_VALUES, values=values))
    return [(LegAccepted(key), None), (LegFinished(key, "stop"), done)]


class _Session:
    def __init__(self, shared: FakeShared, instance_id: str) -> None:
        self._shared, self._instance_id = shared, instance_id

    def open_leg(self, key: int, owner: Any, command: Command) -> bool:
        self._shared.asked.append((self._instance_id, len(command.pool.inputs)))
        said = self._shared.script(self._instance_id, command.pool, key)

        def tell() -> None:
            for event, detail in said:
                owner.on_event(event, detail)
            self._shared.num_told += 1

        asyncio.get_running_loop().call_soon(tell)
        return True

    def send(self, command: Command) -> None:
        self._shared.num_aborts += 1

    def forget(self, key: int) -> None: ...


@dataclass
class FakeShared:
    """The collaborators of the runner in one: fleet, sessions and waiting room."""

    script: Script
    instance_ids: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    asked: list[tuple[str, int]] = field(default_factory=list)
    num_aborts: int = 0
    num_told: int = 0  # the number of batches whose events have all been sent
    poison: PoisonBook = field(default_factory=PoisonBook)
    budget: RetryBudget = field(default_factory=RetryBudget)
    slos: Slos = field(default_factory=lambda: Slos(LIMITS))
    fingerprint: str = "new"  # the only served revision of the model
    hash_secret: bytes = b"secret"
    _keys: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def fleet(self) -> FakeShared:
        return self

    @property
    def sessions(self) -> FakeShared:
        return self

    @property
    def room(self) -> FakeShared:
        return self

    @property
    def pooling(self) -> FakeShared:
        return self

    def next_key(self) -> int:
        return next(self._keys)

    def record(self, instance_id: str, incarnation: int) -> str:
        return instance_id

    def session(self, record: str) -> _Session:
        return _Session(self, record)

    def num_open(self, instance_id: str, incarnation: int) -> int:
        return 0

    def scenario_of(self, model: str) -> str:
        return "default"

    def pinned(self, needs: PoolingNeeds, num_open: Any) -> PoolingNeeds:
        return replace(needs, model=replace(needs.model, fingerprint=self.fingerprint))

    def is_gone(self, needs: PoolingNeeds) -> bool:
        return needs.model.fingerprint != self.fingerprint

    def ranked(
        self, needs: PoolingNeeds, excluded: Collection[PeerId], num_open: Any
    ) -> list[PeerId]:
        return [p for i in self.instance_ids if (p := PeerId(i, 1)) not in excluded]

    def join(self, *_: Any) -> int:
        return 1

    def leave(self, number: int) -> None: ...


class FakeFrontend:
    """A frontend that is also the observer of its calls."""

    def __init__(self, script: Script) -> None:
        self.shared = FakeShared(script)
        self.observer = self
        self.calls: list[Any] = []
        self.events: list[Any] = []
        self.is_draining = False

    def check_open(self) -> None:
        if self.is_draining:
            raise Draining("this gateway is shutting down")

    def take_in(self, call: Any) -> None:
        self.calls.append(call)

    def let_go(self, call: Any) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def on_pooled(self, facts: Any, event: Any, span: Any) -> None:
        self.events.append(event)


class FakePermit:
    """Records the tokens that were charged, and how many of them were used."""

    def __init__(self) -> None:
        self.charged = 0
        self.used = -1
        self.is_refusing = False

    def charge(self, num_tokens: int) -> None:
        if self.is_refusing:
            raise RateLimited("too many tokens")
        self.charged = num_tokens

    async def has_more(self) -> bool:
        return False

    def settle(self, num_used: int) -> None:
        self.used = num_used

    def leave(self) -> None: ...
