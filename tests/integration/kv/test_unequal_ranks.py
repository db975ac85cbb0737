"""Moves KV over UCX between a prefill and a decode with different numbers of ranks. Each rank has a
KV agent, and each piece of the KV has its own connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdmesh.core.instance.arena import ArenaRange  # noqa: E402
from pdmesh.core.kv.layout.buffer_layout import KvShape  # noqa: E402
from pdmesh.core.kv.layout.cache_groups import CacheGroups  # noqa: E402
from pdmesh.core.kv.layout.compatibility import UNSCALED, KvFormat  # noqa: E402
from pdmesh.core.kv.layout.rank_heads import heads_of  # noqa: E402
from pdmesh.core.kv.layout.rank_place import RankPlace  # noqa: E402
from pdmesh.core.kv.transfer.ticket import Ticket  # noqa: E402
from pdmesh.engine.vllm.connector.kv_facts import BESIDE  # noqa: E402
from pdmesh.engine.vllm.connector.scheduler.handoff import KvLoad  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_choice import paged_caches  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_layout import read_layout  # noqa: E402
from pdmesh.engine.vllm.connector.worker.caches import PagedCaches, layout_of  # noqa: E402
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches  # noqa: E402
from pdmesh.engine.vllm.connector.worker.incoming import IncomingKv  # noqa: E402
from pdmesh.engine.vllm.connector.worker.piece_pulls import (  # noqa: E402
    Share,
    TogetherPull,
    pull_pieces,
)
from pdmesh.engine.vllm.messages import PullFailed, RankLandingFreed, RankMessage  # noqa: E402
from pdmesh.errors import KvTransferFailed  # noqa: E402
from pdmesh.kv.agent.agent import KvAgent  # noqa: E402
from pdmesh.kv.agent.arena_memory import host_memory  # noqa: E402
from pdmesh.kv.agent.thread import AgentThread  # noqa: E402
from pdmesh.kv.agent.types import (  # noqa: E402
    AgentEvent,
    AgentIdentity,
    AgentLandingFreed,
    AgentTicketClosed,
)
from pdmesh.kv.transport.ucx import UcxTransport  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

NUM_LAYERS, NUM_BLOCKS, TOKENS, HEAD_DIM = 3, 16, 16, 64
NUM_USED = 5  # the number of blocks of the prompt
ARENA_BYTES = 8 << 20


@dataclass(frozen=True)
class Kind:
    """How a cache stores its numbers.

    For each token and head, `scale_bytes` bytes of scales follow the numbers of K, and as many
    follow the numbers of V. vLLM's int8_per_token_head does the same.
    """

    dtype: str = "bfloat16"
    scales: str = UNSCALED
    scale_bytes: int = 0


BF16 = Kind()
INT8 = Kind("int8", BESIDE, 4)  # the scale is one fp32


@dataclass
class Rank:
    """One rank's KV cache and KV agent. The cache has the shape of flash attention, [2, blocks,
    tokens, heads, head size].
    """

    instance_id: str
    rank: int
    num_ranks: int
    num_heads: int  # the number of heads of the whole model
    kind: Kind = BF16
    events: list[AgentEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_event: Callable[[AgentEvent], object] = self.events.append
        self.mine = heads_of(self.num_heads, self.num_ranks, self.rank)
        kind = self.kind
        shape = (2, NUM_BLOCKS, TOKENS, self.mine.count, HEAD_DIM + kind.scale_bytes)
        dtype = getattr(torch, kind.dtype)
        self.tensors: dict[str, Any] = {
            f"layer.{i}": torch.zeros(shape, dtype=dtype) for i in range(NUM_LAYERS)
        }
        layout = read_layout(self.tensors, NUM_BLOCKS, self.mine.count, is_packed=False)
        self.caches: PagedCaches = paged_caches(self.tensors, layout, NUM_BLOCKS)
        kv = KvFormat("m", kind.dtype, kind.scales, TOKENS, layout.block, num_heads=self.num_heads)
        self.fingerprint = str(kv)
        identity = AgentIdentity(self.instance_id, 7, self.fingerprint, self.rank)

        def make() -> KvAgent:
            return KvAgent(
                UcxTransport("127.0.0.1"),
                identity,
                host_memory(ARENA_BYTES, ARENA_BYTES),
                on_event=self._tell,
            )

        self.agent = AgentThread(make)
        self.address = self.agent.start()

    def _tell(self, event: AgentEvent) -> None:
        self.on_event(event)

    def fill(self, whole: Any, ids: list[int]) -> None:
        """Write this rank's heads of `whole` to these blocks. `whole` has the shape [layer, K or V,
        block, token, head, head size].
        """
        for layer, tensor in enumerate(self.tensors.values()):
            tensor[:, ids] = whole[
                layer, ..., self.mine.first : self.mine.first + self.mine.count, :
            ]

    def holds(self, whole: Any, ids: list[int]) -> bool:
        """Whether the blocks equal this rank's heads of `whole` bit for bit, NaNs included."""
        heads = slice(self.mine.first, self.mine.first + self.mine.count)
        return all(
            torch.equal(
                tensor[:, ids].view(torch.uint8), whole[layer, ..., heads, :].view(torch.uint8)
            )
            for layer, tensor in enumerate(self.tensors.values())
        )

    def stage(self, ids: list[int]) -> None:
        layout = layout_of(self.caches, len(ids), self.fingerprint)
        place = ArenaRange(0, layout.total_bytes)
        self.caches.gather(ids, self.agent.staging(place))
        self.agent.stage("t", 0, place, layout, 20.0).result(5)

    def pull(self, ticket: Ticket, ids: list[int], first_block: int = 0) -> TogetherPull:
        layout = layout_of(self.caches, len(ids), self.fingerprint)
        share = Share(self.num_heads, RankPlace(self.rank, self.num_ranks))
        wanted = share.pieces(ticket, ArenaRange(4096, layout.total_bytes), layout.total_bytes)
        return pull_pieces(
            self.agent,
            ticket,
            wanted,
            leg=1,
            deadline_s=60,
            stall_s=60,
            first_block=first_block,
            num_blocks=NUM_USED,
            on_range=lambda piece, offset, data: self.caches.scatter_part(
                data, offset, ids, piece.here
            ),
        )


def ticket_of(sources: list[Rank]) -> Ticket:
    fingerprint = sources[0].fingerprint
    kv_bytes = layout_of(sources[0].caches, NUM_USED, fingerprint).total_bytes
    addresses = tuple(source.address for source in sources)
    num_tokens = NUM_USED * TOKENS
    return Ticket("t", "r", 0, "prefill-0", 7, fingerprint, num_tokens, kv_bytes, addresses, 20_000)


@contextmanager
def instances(
    num_heads: int, num_sources: int, num_ranks: int, kind: Kind = BF16, target: Kind | None = None
) -> Iterator[tuple[list[Rank], list[Rank]]]:
    """The ranks of a prefill and of a decode. `target` is the decode's kind of cache, if it differs
    from that of the prefill.
    """
    sides = ("prefill-0", num_sources, kind), ("decode-0", num_ranks, target or kind)
    with ExitStack() as stack:
        made: list[list[Rank]] = []
        for name, count, of_side in sides:
            ranks = [Rank(name, i, count, num_heads, of_side) for i in range(count)]
            for rank in ranks:
                stack.callback(rank.agent.close)
            made.append(ranks)
        yield made[0], made[1]


@pytest.mark.req("S57", "S119")
@pytest.mark.parametrize("num_cached", [0, 2])
@pytest.mark.parametrize(
    ("num_heads", "num_sources", "num_ranks"),
    [(8, 2, 1), (8, 1, 2), (8, 4, 2), (2, 1, 4), (2, 4, 1), (4, 2, 2)],
)
def test_every_rank_gets_its_heads_and_every_source_its_acknowledgement(
    num_heads: int, num_sources: int, num_ranks: int, num_cached: int
) -> None:
    """The decode may have cached the first blocks. It must pull none of them."""
    rng = np.random.default_rng(num_heads + num_cached)
    shape = (NUM_LAYERS, 2, NUM_USED, TOKENS, num_heads, HEAD_DIM)
    whole = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, shape, np.int16)).view(
        torch.bfloat16
    )
    source_ids, target_ids = (rng.permutation(NUM_BLOCKS)[:NUM_USED].tolist() for _ in range(2))
    with instances(num_heads, num_sources, num_ranks) as (sources, targets):
        for source in sources:
            source.fill(whole, source_ids)
            source.stage(source_ids)
        ticket = ticket_of(sources)
        fresh = target_ids[num_cached:]
        wanted = whole[:, :, num_cached:]
        under_way: list[tuple[Rank, TogetherPull, list[str]]] = []
        for target in targets:  # all targets pull at once
            told: list[str] = []
            pull = target.pull(ticket, fresh, num_cached)
            pull.start(lambda told=told: told.append("over"))  # type: ignore[misc]
            under_way.append((target, pull, told))
        for target, pull, told in under_way:
            wait_until(lambda told=told: told)  # type: ignore[misc]
            assert pull.error() is None
            assert target.holds(wanted, fresh)
        for source in sources:
            wait_until(lambda source=source: source.events)  # type: ignore[misc]
            assert source.events == [AgentTicketClosed("t", "taken")]


@pytest.mark.req("S126")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_int8_and_the_scales_beside_it_arrive_bit_for_bit(num_ranks: int) -> None:
    """The KV travels as a whole to one rank, or cut by heads to two ranks. The scales of a head
    must arrive with the head's numbers.
    """
    rng = np.random.default_rng(126)
    num_heads, shape = 4, (NUM_LAYERS, 2, NUM_USED, TOKENS, 4)
    numbers = torch.from_numpy(rng.integers(-128, 128, (*shape, HEAD_DIM), np.int8))
    scales = torch.from_numpy(rng.uniform(1e-3, 1e3, (*shape, 1)).astype(np.float32))
    source_ids, ids = (rng.permutation(NUM_BLOCKS)[:NUM_USED].tolist() for _ in range(2))
    with instances(num_heads, 1, num_ranks, INT8) as ((source,), targets):
        for layer, tensor in enumerate(source.tensors.values()):
            tensor[:, source_ids, ..., :HEAD_DIM] = numbers[layer]
            tensor[:, source_ids, ..., HEAD_DIM:] = scales[layer].view(torch.int8)
        source.stage(source_ids)
        ticket = ticket_of([source])
        assert ticket.kv_bytes == KvShape(
            NUM_LAYERS, num_heads, HEAD_DIM, "int8", scale_bytes=2 * INT8.scale_bytes
        ).kv_bytes(NUM_USED * TOKENS, TOKENS)
        for target in targets:
            assert outcome(target.pull(ticket, ids)) is None
            heads = slice(target.mine.first, target.mine.first + target.mine.count)
            for layer, tensor in enumerate(target.tensors.values()):
                got = tensor[:, ids]
                assert torch.equal(got[..., :HEAD_DIM], numbers[layer, ..., heads, :])
                beside = got[..., HEAD_DIM:].contiguous().view(torch.float32)
                assert torch.equal(beside, scales[layer, ..., heads, :])


@pytest.mark.req("S126")
@pytest.mark.parametrize(
    "other",
    [
        Kind("float8_e4m3fn", BESIDE, 4),
        Kind("int8", "per-tensor-12345678", 4),
        Kind("int8", BESIDE, 8),
    ],
    ids=["another dtype", "other scales", "another place for the scales"],
)
def test_int8_is_refused_if_the_receiver_would_read_it_differently(other: Kind) -> None:
    """The bytes may fit but would be read wrongly. Both the handshake and a pull without a
    handshake must refuse.
    """
    with instances(4, 1, 1, INT8, other) as ((source,), (target,)):
        ids = list(range(NUM_USED))
        source.stage(ids)
        with pytest.raises(KvTransferFailed) as refused:
            target.agent.probe([source.address], 7, deadline_s=20).result(20)
        assert refused.value.reason == "KV_REFUSED_WRONG_MODEL"
        error = outcome(target.pull(ticket_of([source]), ids))
        assert error is not None
        assert error.reason == "KV_REFUSED_WRONG_MODEL"
        assert not any(tensor.any() for tensor in target.tensors.values())


def outcome(pull: TogetherPull) -> KvTransferFailed | None:
    told: list[str] = []
    pull.start(lambda: told.append("over"))
    wait_until(lambda: told)
    error = pull.error()
    assert error is None or isinstance(error, KvTransferFailed)
    return error


@pytest.mark.req("S57")
@pytest.mark.fault("F2")
@pytest.mark.parametrize("is_one_lost", [False, True])
@pytest.mark.parametrize("num_sources", [1, 4])
def test_a_rank_waits_for_all_its_sources_and_fails_if_one_fails(
    num_sources: int, is_one_lost: bool
) -> None:
    """The memory in which the KV arrives must become free once, and only when nothing can write to
    it any more.
    """
    num_heads = 8
    rng = np.random.default_rng(5)
    shape = (NUM_LAYERS, 2, NUM_USED, TOKENS, num_heads, HEAD_DIM)
    whole = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, shape, np.int16)).view(
        torch.bfloat16
    )
    ids = list(range(NUM_USED))
    with instances(num_heads, num_sources, 1) as (sources, (target,)):
        for source in sources:
            source.fill(whole, ids)
            source.stage(ids)
        if is_one_lost:
            sources[-1].agent.release("t")
            wait_until(lambda: sources[-1].events)
        said: list[RankMessage] = []
        incoming = IncomingKv(
            Share(num_heads, RankPlace(0, 1)),
            GroupCaches(target.caches, CacheGroups(TOKENS), [0] * NUM_LAYERS, ""),
            target.agent,
            max_pulls=1,
            send=said.append,
        )
        target.on_event = lambda event: (
            incoming.landing_freed(event.offset) if isinstance(event, AgentLandingFreed) else None
        )
        load = KvLoad(
            "key",
            3,
            ticket_of(sources),
            ArenaRange(4096, 4 << 20),
            10.0,
            NUM_USED * TOKENS,
            block_ids=(tuple(ids),),
        )
        incoming.pull(load)
        received: set[str] = set()
        failed: set[str] = set()

        def is_over() -> bool:
            for all_keys, keys in zip((received, failed), incoming.take_results(), strict=True):
                all_keys |= keys
            return bool(received or failed)

        wait_until(is_over)
        wait_until(lambda: RankLandingFreed(0, 3) in said)
        assert (received, failed) == ((set(), {"key"}) if is_one_lost else ({"key"}, set()))
        assert said.count(RankLandingFreed(0, 3)) == 1
        lost = [m for m in said if isinstance(m, PullFailed)]
        assert len(lost) == is_one_lost
        assert all(m.message.startswith("KV_REFUSED_") for m in lost)
        if not is_one_lost:
            assert target.holds(whole, ids)
