"""Decides whether an instance takes a leg, which is a request's stay on one instance (S40, S53).

There is no queue: a leg starts now or is refused. As the only exception, a few decodes may wait,
each until it can take the place of a decode that ends.

Admission reserves a slot, KV blocks and, for a transfer, a range of the arena (memory for
transfers). So an admitted leg never lacks any of these later (S49). Only an engine that can preempt
requests may lack blocks, see `max_reserved_output`. A prefill keeps its slot until the right to
pull its KV has ended. So if decodes are blocked, prefills become full as well (S41). A decode keeps
its slot until it has ended and no late write can reach its range.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from pdmesh.core.adapters.slot_turns import AdapterTurns
from pdmesh.core.instance.arena import ArenaAllocator, ArenaRange
from pdmesh.core.kv.layout import compatibility as kv_format
from pdmesh.errors import shortened


class Work(Enum):
    """The kinds of work that a leg may ask of an instance."""

    PREFILL = auto()  # compute a prompt and stage its KV for another instance
    DECODE = auto()  # pull staged KV and draw the later tokens
    LOCAL = auto()  # do both phases here (fusion, or colocated)
    POOL = auto()  # make vectors or scores of inputs, and keep no KV
    ENCODE = auto()  # make the embeddings of images, which any instance of the group may fetch


class RefusalReason(Enum):
    """Why a leg is refused. The names are those of `pdmesh.v1.RejectReason`, without the prefix."""

    BUSY = auto()
    NO_STAGING = auto()
    NO_KV = auto()
    DRAINING = auto()
    WRONG_ROLE = auto()
    TOO_LONG = auto()
    WRONG_MODEL = auto()
    EXPIRED = auto()
    SOURCE_EJECTED = auto()


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of an empty instance, and the kinds of legs that it takes."""

    works: frozenset[Work]
    num_slots: int  # b_p or b_d in P/D-Serve
    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # bytes of a block on one rank, over all layers
    max_model_len: int  # prompt and output
    staging_bytes: int  # per rank, for KV that waits for other instances
    landing_bytes: int  # per rank, for KV that comes from other instances
    max_retrievals: int  # decodes whose KV is still on its way
    max_waiting: int = 0  # q: decodes beyond the slots, which wait for others to end (S53)
    model_fingerprint: str = ""
    model: str = ""  # the name that clients use
    num_ranks: int = 1
    # For each answer, reserve at most this many tokens. Set for an engine that can preempt
    # requests, since such an engine need not have room for every answer in full.
    max_reserved_output: int | None = None
    num_adapters: int = 0  # LoRA adapters that legs may use at once
    takes_images: bool = False
    # By layer: how many of the last tokens it sees, 0 for all. Empty if every layer sees all.
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A leg that asks for admission. `max_tokens` counts the tokens that it may still draw here.

    For POOL and ENCODE, `num_prompt_tokens` is the length of the longest input or image.
    """

    leg: int
    work: Work
    num_prompt_tokens: int
    max_tokens: int
    remaining_s: float
    model_fingerprint: str | None = None  # for a decode, that of the KV to pull
    model: str = ""  # the model that the request names, or empty
    adapter: str = ""  # digest of the LoRA adapter that the leg computes with, or empty
    has_images: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A leg is admitted.

    `range` is in the arena for staging if the work is PREFILL, in the arena for landing if it is
    DECODE, and None for other work.
    """

    leg: int
    range: ArenaRange | None


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusalReason
    retry_after_ms: int = 0
    detail: str = ""


@dataclass(slots=True)
class _Held:
    work: Work
    since: float
    range: ArenaRange | None
    num_blocks: int
    is_retrieving: bool
    adapter: str = ""
    has_ended: bool = False


_MIN_RETRY_MS, _MAX_RETRY_MS = 1, 1000
_WITH_RANGE = frozenset({Work.PREFILL, Work.DECODE})
_WITHOUT_ANSWER = frozenset({Work.POOL, Work.ENCODE})


@dataclass(slots=True)
class Admission:
    """The record of what one instance has reserved.

    `admit` reserves. `computed`, `ended` and `range_freed` give back what was reserved, and may be
    repeated.
    """

    capacity: Capacity
    is_draining: bool = False
    version: int = 0  # number of the state that `Load` reports; grows with each change
    _held: dict[int, _Held] = field(default_factory=dict)
    _num_blocks_used: int = 0
    _num_retrieving: int = 0
    _hold_s: float = 0.02  # moving average of the time for which a slot is held
    _adapters: AdapterTurns = field(init=False)
    _staging: ArenaAllocator = field(init=False)
    _landing: ArenaAllocator = field(init=False)

    def __post_init__(self) -> None:
        self._adapters = AdapterTurns(self.capacity.num_adapters)
        self._staging = ArenaAllocator(self.capacity.staging_bytes)
        self._landing = ArenaAllocator(self.capacity.landing_bytes)

    @property
    def num_places(self) -> int:
        """How many legs the instance takes: `num_slots` that run and `max_waiting` that wait."""
        return self.capacity.num_slots + self.capacity.max_waiting

    @property
    def num_slots_used(self) -> int:
        return len(self._held)

    @property
    def num_blocks_free(self) -> int:
        return self.capacity.num_blocks - self._num_blocks_used

    @property
    def num_retrieving(self) -> int:
        return self._num_retrieving

    @property
    def staging_bytes_used(self) -> int:
        return self._staging.bytes_used

    @property
    def landing_bytes_used(self) -> int:
        return self._landing.bytes_used

    def admit(self, ask: Ask, now: float) -> Admitted | Refused:
        """Reserve all that the leg needs. Otherwise return why not, and when to ask again.

        A refusal changes nothing, except that an adapter without a slot may begin to wait for one.
        """
        assert ask.leg not in self._held
        num_blocks = self._blocks_for(ask)
        if refused := self._refuse_always(ask, num_blocks) or self._refuse_now(
            ask, num_blocks, now
        ):
            return refused
        held = _Held(ask.work, now, None, num_blocks, ask.work is Work.DECODE, ask.adapter)
        if ask.work in _WITH_RANGE:
            held.range = self._arena(ask.work).reserve(self._kv_bytes(ask))
            if held.range is None:
                return self._later(RefusalReason.NO_STAGING, "arena full")
        self._held[ask.leg] = held
        self._num_blocks_used += num_blocks
        self._num_retrieving += held.is_retrieving
        self._adapters.taken(held.adapter, now)
        self.version += 1
        return Admitted(ask.leg, held.range)

    def computed(self, leg: int) -> None:
        """A prefill has staged its KV and frees its blocks, or a decode's KV is in its blocks."""
        if (held := self._held.get(leg)) is None:
            return
        if held.is_retrieving:
            held.is_retrieving = False
            self._num_retrieving -= 1
        if held.work is Work.PREFILL:
            self._free_blocks(held)
        self.version += 1

    def ended(self, leg: int, now: float) -> None:
        """The leg has finished, failed or was aborted, so it computes no more.

        Its range may still be read or written.
        """
        if (held := self._held.get(leg)) is None or held.has_ended:
            return
        self.computed(leg)
        self._free_blocks(held)
        held.has_ended = True
        self._close_if_free(leg, held, now)

    def range_freed(self, leg: int, now: float) -> None:
        """The leg's range is free.

        For a prefill this means that nothing reads the range any more, because the ticket is
        closed. For a decode it means that no late write can reach the range.
        """
        if (held := self._held.get(leg)) is None or held.range is None:
            return
        self._arena(held.work).free(held.range)
        held.range = None
        if held.work is Work.PREFILL:
            self.ended(leg, now)
        self._close_if_free(leg, held, now)

    def drain(self, is_draining: bool) -> None:
        """Refuse every new leg from now on or, if `is_draining` is false, admit legs again."""
        if self.is_draining != is_draining:
            self.is_draining = is_draining
            self.version += 1

    def _close_if_free(self, leg: int, held: _Held, now: float) -> None:
        if held.has_ended and held.range is None and leg in self._held:
            del self._held[leg]
            self._hold_s += 0.1 * (now - held.since - self._hold_s)
            self.version += 1

    def _free_blocks(self, held: _Held) -> None:
        """Free the blocks and the adapter of a leg that computes no more."""
        self._num_blocks_used -= held.num_blocks
        held.num_blocks = 0
        self._adapters.left(held.adapter)
        held.adapter = ""

    def _refuse_always(self, ask: Ask, num_blocks: int) -> Refused | None:
        """A refusal that an empty instance would give, too."""
        capacity = self.capacity
        if ask.work not in capacity.works:
            return Refused(RefusalReason.WRONG_ROLE, detail=f"no {ask.work.name.lower()} here")
        if ask.model not in ("", capacity.model):
            detail = f"{shortened(ask.model)!r} is not {shortened(capacity.model)!r}"
            return Refused(RefusalReason.WRONG_MODEL, detail=detail)
        if ask.model_fingerprint not in (None, capacity.model_fingerprint):
            detail = kv_format.difference(ask.model_fingerprint, capacity.model_fingerprint)
            return Refused(RefusalReason.WRONG_MODEL, detail=detail)
        if ask.adapter and not capacity.num_adapters:
            return Refused(
                RefusalReason.WRONG_MODEL, detail="it takes no adapters: set ENABLE_LORA"
            )
        if ask.has_images and not capacity.takes_images:
            return Refused(RefusalReason.WRONG_MODEL, detail="its model takes no images")
        if self._least_len(ask) > capacity.max_model_len or num_blocks > capacity.num_blocks:
            return Refused(
                RefusalReason.TOO_LONG, detail="longer than the context or the KV memory"
            )
        if ask.work in _WITH_RANGE and self._kv_bytes(ask) > self._arena(ask.work).size:
            return Refused(RefusalReason.TOO_LONG, detail="larger than the arena")
        return None

    def _refuse_now(self, ask: Ask, num_blocks: int, now: float) -> Refused | None:
        if ask.remaining_s <= 0:
            return Refused(RefusalReason.EXPIRED, detail="the deadline has passed")
        if self.is_draining:
            return Refused(RefusalReason.DRAINING)
        # Before the other checks, because the call makes an adapter without a slot wait for one.
        why = self._adapters.why_not(ask.adapter, now)
        if len(self._held) >= self.num_places:
            return self._later(RefusalReason.BUSY, "no free slot")
        if ask.work is Work.DECODE and self._num_retrieving >= self.capacity.max_retrievals:
            return self._later(RefusalReason.BUSY, "too many retrievals")
        if why:
            return self._later(RefusalReason.BUSY, why)
        if num_blocks > self.num_blocks_free:
            return self._later(RefusalReason.NO_KV, "no free KV blocks")
        return None

    def _later(self, reason: RefusalReason, detail: str) -> Refused:
        wait_ms = round(1000 * self._hold_s / self.capacity.num_slots)
        return Refused(reason, min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS), detail)

    @staticmethod
    def _least_len(ask: Ask) -> int:
        """The prompt's length plus the fewest useful tokens: token 1, and one more for a decode."""
        if ask.work in _WITHOUT_ANSWER:
            return ask.num_prompt_tokens
        return ask.num_prompt_tokens + (2 if ask.work is Work.DECODE else 1)

    def _blocks_for(self, ask: Ask) -> int:
        """How many blocks the prompt and, except for PREFILL, the longest answer need."""
        if ask.work in _WITHOUT_ANSWER:
            return 0  # inputs have KV for one step at most, and images have none
        num_tokens = ask.num_prompt_tokens
        if ask.work is not Work.PREFILL:
            output = ask.max_tokens + (ask.work is Work.DECODE)
            if self.capacity.max_reserved_output is not None:
                output = min(output, self.capacity.max_reserved_output)
            num_tokens = min(num_tokens + output, max(self.capacity.max_model_len, num_tokens))
        return -(-num_tokens // self.capacity.block_size)

    def _kv_bytes(self, ask: Ask) -> int:
        """The bytes of the prompt's KV in whole blocks, as they are staged and pulled."""
        num_blocks = -(-ask.num_prompt_tokens // self.capacity.block_size)
        return num_blocks * self.capacity.block_bytes

    def _arena(self, work: Work) -> ArenaAllocator:
        return self._staging if work is Work.PREFILL else self._landing

    def check_invariants(self) -> None:
        held = self._held.values()
        assert len(held) <= self.num_places
        assert self._num_blocks_used == sum(h.num_blocks for h in held)
        assert 0 <= self._num_blocks_used <= self.capacity.num_blocks
        assert self._adapters.legs == Counter(h.adapter for h in held if h.adapter)
        self._adapters.check_invariants()
        assert self._num_retrieving == sum(h.is_retrieving for h in held)
        assert self._num_retrieving <= self.capacity.max_retrievals
        for work in (Work.PREFILL, Work.DECODE):
            ranges = [h.range for h in held if h.work is work and h.range]
            assert len(ranges) == self._arena(work).num_ranges
            self._arena(work).check_invariants()
