"""Plans, in vLLM's scheduler, which blocks of KV each step gathers or receives for the mesh.

This is the scheduler's half of the hand-over, which passes a prompt's KV from prefill to decode.
The worker's half carries out the plan in the same step. The step that computes a prompt's last
token gathers the prompt's blocks, so that they can go back to the prefix cache at once. If a prompt
is handed on per layer, each step gathers the blocks that it fills (S48). The plan also names
requests that end before their KV is moved. The memory that is reserved for that KV can then be
freed, because nothing will touch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pdmesh.core.kv.layout.cache_groups import BlockIds, BlockLists, CacheGroups
from pdmesh.engine.base import ArenaRange, Ticket

STORE, LOAD = "store", "load"


@dataclass(frozen=True, slots=True)
class Store:
    """Order to stage a computed prompt under a ticket.

    To stage is to copy the prompt's KV into an arena range. The ticket is a decode's right to pull
    the KV from there.
    """

    ticket_id: str
    attempt: int
    staging: ArenaRange
    lease_s: float
    num_tokens: int
    is_per_layer: bool = False
    block_ids: BlockIds = ()  # the blocks that are handed on


@dataclass(frozen=True, slots=True)
class StorePart:
    """Order to gather the blocks that a step fills, each layer as soon as it is computed.

    If `is_last`, a layer may be pulled as soon as this part of the layer is gathered.
    """

    store: Store  # without its blocks
    first_block: int  # earlier steps have gathered the blocks below this one
    end_block: int
    block_ids: BlockIds  # the blocks below `end_block` that are handed on
    is_last: bool


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Order to pull a ticket's KV into a request's blocks.

    The first `num_local_blocks` blocks are in the prefix cache already. If `block_ids` is empty,
    all blocks are cached, and nothing is pulled. A load may have to wait for a turn before it
    pulls. `timeout_s` is the limit for that wait, and also for the pull. The time until a step
    begins the load has no limit here.
    """

    key: str  # vLLM's name of the request
    leg: int
    ticket: Ticket
    landing: ArenaRange
    timeout_s: float
    num_tokens: int
    is_early: bool = False  # token 1 is not known yet: the request's last token is a stand-in
    num_local_blocks: int = 0
    block_ids: BlockIds = ()
    stall_s: float = math.inf  # longest silence of a sender that has computed all of the bytes


@dataclass(frozen=True, slots=True)
class Entered:
    """A loaded request computes its first tokens in this step."""

    leg: int
    # tokens of the prompt that are computed here although they were to be pulled
    num_computed_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What a rank does in one engine step.

    Drops, loads and entries come before the step's forward, in this order. Stores come after it.
    """

    stores: list[Store] = field(default_factory=list)
    parts: list[StorePart] = field(default_factory=list)  # gathered within the forward
    loads: list[KvLoad] = field(default_factory=list)
    takes: list[KvLoad] = field(
        default_factory=list
    )  # all blocks are cached here, so only an acknowledgement is sent
    entered: list[Entered] = field(default_factory=list)
    cancelled: list[KvLoad] = field(default_factory=list)  # started loads of ended requests
    dropped_tickets: list[str] = field(default_factory=list)
    dropped_legs: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # requests that can only be computed elsewhere


def store_params(
    ticket_id: str,
    attempt: int,
    staging: ArenaRange,
    lease_s: float,
    is_per_layer: bool = False,
) -> dict[str, Any]:
    """The `kv_transfer_params` of a prefill whose KV is handed on, as plain values for vLLM."""
    return {
        "pdmesh": STORE,
        "ticket_id": ticket_id,
        "attempt": attempt,
        "staging": [staging.offset, staging.length],
        "lease_s": lease_s,
        "is_per_layer": is_per_layer,
    }


def load_params(
    leg: int,
    ticket: Ticket,
    landing: ArenaRange,
    timeout_s: float,
    num_tokens: int,
    is_early: bool = False,
    stall_s: float = math.inf,
) -> dict[str, Any]:
    """The `kv_transfer_params` of a decode whose prompt of `num_tokens` tokens is pulled."""
    return {
        "pdmesh": LOAD,
        "leg": leg,
        "ticket": asdict(ticket),
        "landing": [landing.offset, landing.length],
        "timeout_s": timeout_s,
        "num_tokens": num_tokens,
        "is_early": is_early,
        "stall_s": stall_s,
    }


def _store(params: Mapping[str, Any], num_tokens: int) -> Store:
    offset, length = params["staging"]
    return Store(
        params["ticket_id"],
        params["attempt"],
        ArenaRange(offset, length),
        params["lease_s"],
        num_tokens,
        params["is_per_layer"],
    )


def _load(key: str, params: Mapping[str, Any]) -> KvLoad:
    ticket = params["ticket"]
    offset, length = params["landing"]
    return KvLoad(
        key,
        params["leg"],
        Ticket(**{**ticket, "addresses": tuple(ticket["addresses"])}),
        ArenaRange(offset, length),
        params["timeout_s"],
        params["num_tokens"],
        params["is_early"],
        stall_s=params["stall_s"],
    )


class HandoffPlanner:
    """Makes one `StepPlan` per step from the scheduler's reports.

    `key` is vLLM's name of a request.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._groups, self._block_size = groups, groups.block_size
        self._stores: dict[str, Store] = {}  # not staged yet
        self._num_gathered: dict[str, int] = {}  # by key: gathered blocks of a per-layer store
        self._unjoined: set[str] = set()  # early loads whose token 1 is not known
        self._loads: dict[str, KvLoad] = {}  # not started yet
        self._started: dict[str, KvLoad] = {}  # given to the worker, not computing yet
        self._plan = StepPlan()

    def add(self, key: str, params: Mapping[str, Any], num_prompt_tokens: int) -> None:
        """A request arrived.

        If `params` has no "pdmesh", the mesh does not move the request's KV.
        """
        match params.get("pdmesh"):
            case "store":
                self._stores[key] = _store(params, num_prompt_tokens)
            case "load":
                self._loads[key] = load = _load(key, params)
                if load.is_early:
                    self._unjoined.add(key)

    def joined(self, key: str) -> None:
        """Token 1 of an early load is set."""
        self._unjoined.discard(key)

    def num_external_tokens(self, key: str, num_local_tokens: int) -> int | None:
        """The number of tokens to pull, which follow the locally cached ones.

        0 means that there are none, or that they are pulled already. With 0, the scheduler computes
        the request at once. So while token 1 is not known, the result is None instead, and the
        scheduler repeats the call in a later step.
        """
        load = self._loads.get(key)
        num_external = max(0, load.num_tokens - num_local_tokens) if load else 0
        return None if not num_external and key in self._unjoined else num_external

    def allocated(self, key: str, block_ids: BlockLists, num_external_tokens: int) -> None:
        """vLLM has allocated blocks to the request.

        Plan the request's load, or only an acknowledgement if nothing is to be pulled.
        """
        load = self._loads.pop(key, None)
        if load is None:
            return
        num_blocks = self._groups.num_blocks(load.num_tokens)
        num_local = num_blocks
        if num_external_tokens:
            local_tokens = load.num_tokens - num_external_tokens
            assert local_tokens % self._block_size == 0, "a local hit ends at a block"
            num_local = local_tokens // self._block_size
        ids: BlockIds = ()
        if num_local < num_blocks:
            ids = self._groups.needed(block_ids, load.num_tokens, num_local, num_blocks)
        load = replace(load, num_local_blocks=num_local, block_ids=ids)
        self._started[key] = load
        (self._plan.loads if num_external_tokens else self._plan.takes).append(load)

    def scheduled(
        self,
        key: str,
        num_computed_tokens: int,
        num_scheduled_tokens: int,
        block_ids: Callable[[], BlockLists],
    ) -> None:
        """The request computes `num_scheduled_tokens` in this step, after `num_computed_tokens`."""
        store = self._stores.get(key)
        if store and store.is_per_layer:
            self._gather_part(key, store, num_computed_tokens + num_scheduled_tokens, block_ids)
        elif store and num_computed_tokens + num_scheduled_tokens >= store.num_tokens:
            del self._stores[key]
            self._plan.stores.append(self._with_blocks(store, block_ids()))
        load = self._started.pop(key, None)
        if load:
            computed = max(0, load.num_tokens - num_computed_tokens)
            self._plan.entered.append(Entered(load.leg, computed))

    def finished(self, key: str) -> None:
        store = self._stores.pop(key, None)
        self._num_gathered.pop(key, None)
        self._unjoined.discard(key)
        if store:
            self._plan.dropped_tickets.append(store.ticket_id)
        load = self._loads.pop(key, None)
        if load:
            self._plan.dropped_legs.append(load.leg)
        load = self._started.pop(key, None)
        if load:
            self._plan.cancelled.append(load)

    def lose(self, key: str) -> None:
        """Fail the request, because it needs KV that no instance sends any more."""
        self._plan.lost.append(key)

    def take_plan(self) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        return plan

    def _gather_part(
        self, key: str, store: Store, num_tokens: int, block_ids: Callable[[], BlockLists]
    ) -> None:
        """Gather the blocks that are full once `num_tokens` are computed.

        With the prompt's last token, also gather its partial block.
        """
        is_last = num_tokens >= store.num_tokens
        num_blocks = self._groups.num_blocks(store.num_tokens)
        first = self._num_gathered.get(key, 0)
        last = num_blocks if is_last else num_tokens // self._block_size
        if is_last:
            del self._stores[key]
            self._num_gathered.pop(key, None)
        elif last <= first:
            return
        else:
            self._num_gathered[key] = last
        ids = self._groups.needed(block_ids(), store.num_tokens, 0, last)
        self._plan.parts.append(StorePart(store, first, last, ids, is_last))

    def _with_blocks(self, store: Store, block_ids: BlockLists) -> Store:
        num_blocks = self._groups.num_blocks(store.num_tokens)
        assert all(len(ids) >= num_blocks for ids in block_ids)
        return replace(
            store, block_ids=self._groups.needed(block_ids, store.num_tokens, 0, num_blocks)
        )

    def check_invariants(self) -> None:
        assert not self._loads.keys() & self._started.keys()
        assert not self._stores.keys() & (self._loads.keys() | self._started.keys())
