"""Decides which blocks a step of the engine loads from the host pool, and which it saves there.

The host pool has KV blocks in host memory. Before a prompt reaches the engine, `load_plan.py`
decides which of its blocks are loaded instead of computed. The prompt then comes with the right to
load these blocks (here called a lease). Until the lease ends, no rank evicts the blocks from its
pool. The step that begins the prompt loads the blocks that the engine lacks.

A step saves every block that it completes, because vLLM reports evictions too late for saving. The
events come from vLLM's scheduler. The ranks (the engine's workers) carry out the decisions
(`tier_worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.layout.cache_groups import NULL_BLOCK, BlockIds, BlockLists
from pdmesh.core.kv.prefix.block_hash import HASH_BYTES, ImageAt, block_hashes
from pdmesh.core.kv.tiers.owner import owner_of


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Copies blocks of a lease to `block_ids`.

    `first` is the position in the prompt of the first block to copy. `leg`, a request's stay on
    this instance, identifies the lease. `block_ids` has ids by cache group, a set of layers that
    need the same blocks. If a group does not need a block, the id is `NULL_BLOCK`. Empty
    `block_ids` only end the lease.
    """

    leg: int
    first: int = 0
    block_ids: BlockIds = ()


@dataclass(frozen=True, slots=True)
class PoolSave:
    """Saves a request's newest complete blocks from `block_ids`, which has ids by cache group.

    `names` has the names of all complete blocks of the request, the newest last.
    """

    names: tuple[bytes, ...]
    owner: bytes
    block_ids: BlockIds


@dataclass(slots=True)
class StepCopies:
    """The copies of one step: loads before the forward pass, saves after it."""

    loads: list[PoolLoad] = field(default_factory=list)
    saves: list[PoolSave] = field(default_factory=list)
    num_tokens: int = 0  # how many tokens the step computes


@dataclass(slots=True)
class _Chain:
    """The named blocks of one request."""

    root: bytes
    owner: bytes
    tokens: Sequence[int]  # the request's own list, which grows
    images: Sequence[ImageAt] = ()
    names: list[bytes] = field(default_factory=list)
    num_saved: int = 0


@dataclass(frozen=True, slots=True)
class _Offer:
    leg: int
    first: int
    count: int


class StepCopyPlanner:
    """Collects the events of a step and makes its `StepCopies`. `key` is vLLM's id of a request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[str, _Chain] = {}
        self._offers: dict[str, _Offer] = {}
        self._plan = StepCopies()

    def add(
        self,
        key: str,
        cache_salt: str | None,
        tokens: Sequence[int],
        offer: Sequence[int] | None,
        *,
        is_pulled: bool = False,
        images: Sequence[ImageAt] = (),
    ) -> None:
        """A request has arrived. `offer` is (leg, first, count) of its lease, if it has one.

        Without a `cache_salt`, from which block names are derived, the blocks are not saved. If the
        prompt's KV is pulled from a prefill, only the answer is saved, because the prefill's pool
        has the prompt.
        """
        if offer is not None:
            self._offers[key] = _Offer(*offer)
        if cache_salt is None or len(cache_salt) != 2 * HASH_BYTES:
            return
        try:
            root = bytes.fromhex(cache_salt)
        except ValueError:
            return
        chain = self._chains[key] = _Chain(root, owner_of(cache_salt), tokens, images)
        if is_pulled:
            # The last of these tokens is token 1. The prefill never computed its KV.
            chain.num_saved = (len(tokens) - 1) // self._block_size

    def num_external_tokens(self, key: str, num_local_tokens: int) -> int:
        """How many tokens the lease adds to the `num_local_tokens` that the engine has.

        0 if the lease does not continue these tokens.
        """
        offer = self._offers.get(key)
        if offer is None or num_local_tokens % self._block_size:
            return 0
        num_local = num_local_tokens // self._block_size
        if not offer.first <= num_local < offer.first + offer.count:
            return 0
        return (offer.first + offer.count - num_local) * self._block_size

    def allocated(self, key: str, block_ids: BlockLists, num_external_tokens: int) -> None:
        """The request has its blocks, and the load follows in the same step.

        A lease is used once. If vLLM later asks for the request's external tokens again, for
        example after a preemption, the answer is 0.
        """
        offer = self._offers.pop(key, None)
        if offer is None:
            return
        count = num_external_tokens // self._block_size
        end = offer.first + offer.count
        ids = _from(block_ids, end - count, end, any)
        self._plan.loads.append(PoolLoad(offer.leg, end - len(ids[0]), ids if ids[0] else ()))

    def scheduled(
        self,
        key: str,
        num_computed_tokens: int,
        num_scheduled_tokens: int,
        block_ids: Callable[[], BlockLists],
    ) -> None:
        """The request computes `num_scheduled_tokens` in this step, after `num_computed_tokens`."""
        self._plan.num_tokens += num_scheduled_tokens
        chain = self._chains.get(key)
        if chain is None:
            return
        # Draft tokens are scheduled but are not in `tokens`. A block has a name only when all its
        # tokens are known.
        known = min(num_computed_tokens + num_scheduled_tokens, len(chain.tokens))
        num_full = known // self._block_size
        if num_full <= chain.num_saved:
            return
        named = len(chain.names) * self._block_size
        fresh = list(chain.tokens[named : num_full * self._block_size])
        parent = chain.names[-1] if chain.names else b""
        images = [(at - named, digest) for at, digest in chain.images if at >= named]
        chain.names += block_hashes(chain.root, fresh, self._block_size, parent, images)
        ids = _from(block_ids(), chain.num_saved, num_full, all)
        self._plan.saves.append(PoolSave(tuple(chain.names[:num_full]), chain.owner, ids))
        chain.num_saved = num_full

    def finished(self, key: str) -> None:
        """The request is over, for whatever reason."""
        self._chains.pop(key, None)
        offer = self._offers.pop(key, None)
        if offer is not None:
            self._plan.loads.append(PoolLoad(offer.leg))

    def take_plan(self) -> StepCopies:
        plan, self._plan = self._plan, StepCopies()
        return plan

    @property
    def is_idle(self) -> bool:
        return not (self._chains or self._offers)


def _from(
    block_ids: BlockLists, first: int, end: int, who: Callable[[Iterable[bool]], bool]
) -> BlockIds:
    """The ids of the blocks from `first` to `end - 1`, by group, without leading missing blocks.

    `who` is `any` or `all`. With `any`, a block is missing if its id is `NULL_BLOCK` in all groups,
    and with `all`, if its id is `NULL_BLOCK` in at least one.
    """
    rows = list(zip(*(ids[first:end] for ids in block_ids), strict=True))
    held = [who(i != NULL_BLOCK for i in row) for row in rows]
    start = first + (held.index(True) if True in held else len(held))
    return tuple(tuple(ids[start:end]) for ids in block_ids)
