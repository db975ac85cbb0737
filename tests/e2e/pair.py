"""One prefill and one decode engine on vLLM, without services.

`Host` drives an engine as an instance does, with arenas and one queue of outputs per leg. A leg is
a request's stay on one engine. Each engine's workers are separate processes, and KV moves between
them. `Pair` sends requests through both engines, and each host can check that everything is freed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.instance.arena import ArenaAllocator
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY
from pdmesh.core.kv.layout.compatibility import rank_bytes
from pdmesh.core.kv.prefix.block_hash import block_hashes, tenant_root
from pdmesh.core.kv.tier import Tier
from pdmesh.engine.base import (
    AdaptersChanged,
    ArenaRange,
    BlocksChanged,
    DecodeJob,
    EngineInfo,
    Failed,
    Finished,
    KvArrived,
    KvPulling,
    KvReceived,
    LandingFreed,
    Output,
    Prefilled,
    PrefillJob,
    Sampling,
    Ticket,
    TicketClosed,
    TicketOpened,
    TiersReported,
    Tokens,
)
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.kv.tiers.peers import FindHolders

PULL_DEADLINE_S = 60.0
# the cores of each rank, which an engine chooses if this variable is not set
CORES = "VLLM_CPU_OMP_THREADS_BIND"
_legs = itertools.count(1)  # keys for the legs of all engines, because pairs share engines


class LegFailed(Exception):
    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.reason}: {failed.message}")
        self.reason = failed.reason


@dataclass(slots=True)
class Host:
    """An engine, its arenas, and one queue of outputs per leg."""

    engine: VllmEngine
    staging: ArenaAllocator
    landing: ArenaAllocator
    info: EngineInfo
    legs: dict[int, asyncio.Queue[Output]] = field(default_factory=dict)
    tickets: dict[str, ArenaRange] = field(default_factory=dict)
    # The tickets of legs that have no output yet.
    ticket_of: dict[int, str] = field(default_factory=dict)
    landings: dict[int, ArenaRange] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)  # the reason by ticket
    kv_stages: dict[int, list[type[Output]]] = field(default_factory=dict)
    blocks: set[bytes] = field(default_factory=set)
    pool_blocks: set[bytes] = field(default_factory=set)  # names of the blocks in the host pool
    tier_counts: dict[tuple[str, str], int] = field(default_factory=dict)  # by (tier, event)
    adapters: tuple[str, ...] = ()  # the digests of the loaded adapters
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def kv_bytes(self, num_tokens: int) -> int:
        size = self.info.block_size
        return -(-num_tokens // size) * size * self.info.kv_bytes_per_token

    async def pump(self) -> None:
        try:
            async for batch in self.engine.outputs():
                for output in batch:
                    self._take(output)
                async with self.changed:
                    self.changed.notify_all()
        except Exception as error:
            self.ended.set_exception(error)

    async def next_output(self, leg: int) -> Output:
        return await asyncio.wait_for(self.legs[leg].get(), 120)

    def abort(self, leg: int) -> None:
        self.engine.abort(leg)
        del self.legs[leg]

    def _take(self, output: Output) -> None:
        match output:
            case TicketClosed():
                self._hear_closed(output)
            case LandingFreed():
                self.landing.free(self.landings.pop(output.leg))
            case TiersReported():
                for key, count in output.report.counts.items():
                    self.tier_counts[key] = self.tier_counts.get(key, 0) + count
            case AdaptersChanged():
                self.adapters = output.loaded
            case BlocksChanged():
                self._hear_blocks(output)
            case TicketOpened():
                # from here on, the ticket is closed separately from the leg
                del self.ticket_of[output.leg]
                self.legs[output.leg].put_nowait(output)
            case Prefilled() | Failed():
                self._hear_end(output)
            case KvPulling() | KvArrived() | KvReceived() | Tokens() | Finished():
                self._hear_decode(output)
            case _:
                raise AssertionError(f"vLLM does not say {type(output).__name__}")

    def _hear_closed(self, output: TicketClosed) -> None:
        self.closed[output.ticket_id] = output.reason
        if (staged := self.tickets.pop(output.ticket_id, None)) is not None:
            self.staging.free(staged)  # if there is none, the leg failed before its ticket was open

    def _hear_blocks(self, output: BlocksChanged) -> None:
        removed, stored = set(output.removed), set(output.stored)
        if output.tier is Tier.HOST:
            self.pool_blocks = self.pool_blocks - removed | stored
        else:
            self.blocks = stored if output.is_cleared else self.blocks - removed | stored

    def _hear_decode(self, output: KvPulling | KvArrived | KvReceived | Tokens | Finished) -> None:
        if isinstance(output, KvPulling | KvArrived):
            self.kv_stages.setdefault(output.leg, []).append(type(output))
        else:
            self.legs[output.leg].put_nowait(output)

    def _hear_end(self, output: Prefilled | Failed) -> None:
        ticket_id = self.ticket_of.pop(output.leg, "")
        if ticket_id and not (isinstance(output, Prefilled) and output.ticket):
            self.staging.free(self.tickets.pop(ticket_id))
        if output.leg in self.legs:
            self.legs[output.leg].put_nowait(output)

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until `is_so` returns true. Raises TimeoutError."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(is_so), timeout_s)

    async def until_idle(self) -> None:
        """Wait until all reservations are freed and the engine holds nothing."""
        await self.until(lambda: not self.tickets and not self.landings)
        assert self.staging.bytes_used == 0
        assert self.landing.bytes_used == 0
        async with asyncio.timeout(10):
            while not self.engine.is_idle:
                await asyncio.sleep(0.01)
        self.engine.check_idle()


@asynccontextmanager
async def running(
    config: VllmConfig, find_holders: FindHolders | None = None
) -> AsyncIterator[Host]:
    """A running engine whose outputs are collected. It is stopped at the end of the block."""
    engine = VllmEngine(config, find_holders)
    is_bound = CORES in os.environ
    try:
        info = await engine.start()
    finally:
        if not is_bound:  # the next engine in this process may have another number of ranks
            os.environ.pop(CORES, None)
    host = Host(
        engine, ArenaAllocator(config.staging_bytes), ArenaAllocator(config.landing_bytes), info
    )
    pump = asyncio.create_task(host.pump(), name=f"pump-{config.instance_id}")
    try:
        yield host
    finally:
        pump.cancel()
        await asyncio.wait([pump])
        await engine.stop()


@dataclass(slots=True)
class Pair:
    """A prefill and a decode. `generate` handles one request as a gateway does, without retries."""

    prefill: Host
    decode: Host
    salt: str = "public"
    num_computed_at_decode: int = 0  # the prompt tokens that the decode had to compute
    num_handed_over: int = 0
    last_received: KvReceived | None = None
    adapter: Adapter | None = None
    images: tuple[PromptImage, ...] = ()  # the images of every prompt
    priority: int = DEFAULT_PRIORITY

    def names(self, prompt: Sequence[int]) -> tuple[bytes, ...]:
        """The names of the prompt's full blocks."""
        root = bytes.fromhex(self.root())
        places = [(image.position, image.digest) for image in self.images]
        return tuple(block_hashes(root, prompt, self.prefill.info.block_size, images=places))

    def root(self) -> str:
        fingerprint = self.prefill.info.model_fingerprint
        digest = self.adapter.digest if self.adapter is not None else ""
        return tenant_root(b"e2e", "default", self.salt, fingerprint, digest).hex()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        first = await self.prefilled(prompt, sampling)
        if first.ticket is None:
            return [first.token]
        return [first.token, *await self.decoded(prompt, first.token, first.ticket, sampling)]

    def next_leg(self, host: Host) -> int:
        leg = next(_legs)
        host.legs[leg] = asyncio.Queue()
        return leg

    async def prefilled(self, prompt: Sequence[int], sampling: Sampling) -> Prefilled:
        leg = await self.start_prefill(prompt, sampling)
        first = await self.prefill.next_output(leg)
        del self.prefill.legs[leg]
        if isinstance(first, Failed):
            raise LegFailed(first)
        assert isinstance(first, Prefilled)
        return first

    async def generate_per_layer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """Generate with KV that is handed over per layer.

        The decode starts when the prefill has opened its ticket, before token 1 is drawn. An answer
        of one token has no ticket, so it needs no decode.
        """
        if sampling.max_tokens == 1:
            return await self.generate(prompt, sampling)
        prefill = await self.start_prefill(prompt, sampling, is_per_layer=True)
        opened = await self.prefill.next_output(prefill)
        assert isinstance(opened, TicketOpened), opened
        decode = await self.start_decode(prompt, None, opened.ticket, sampling)
        first = await self.prefill.next_output(prefill)
        assert isinstance(first, Prefilled), first
        del self.prefill.legs[prefill]
        if first.ticket is None:
            self.decode.abort(decode)
            return [first.token]
        self.decode.engine.join(decode, first.token)
        return [first.token, *await self.rest(decode)]

    async def start_prefill(
        self, prompt: Sequence[int], sampling: Sampling, *, is_per_layer: bool = False
    ) -> int:
        host = self.prefill
        staging = await _reserve(host, host.staging, host.kv_bytes(len(prompt)))
        leg = self.next_leg(host)
        ticket_id = host.ticket_of[leg] = f"ticket-{leg}"
        host.tickets[ticket_id] = staging
        host.engine.prefill(
            PrefillJob(
                leg,
                f"r{leg}",
                0,
                array("I", prompt),
                sampling,
                ticket_id,
                staging,
                is_per_layer,
                cache_salt=self.root(),
                block_hashes=self.names(prompt),
                adapter=self.adapter,
                images=self.images,
                priority=self.priority,
            )
        )
        return leg

    async def decoded(
        self, prompt: Sequence[int], token: int, ticket: Ticket, sampling: Sampling
    ) -> list[int]:
        return await self.rest(await self.start_decode(prompt, token, ticket, sampling))

    async def rest(self, leg: int) -> list[int]:
        """All tokens that a decode draws. Raises LegFailed."""
        received = await self.decode.next_output(leg)
        if isinstance(received, Failed):
            raise LegFailed(received)
        assert isinstance(received, KvReceived), "the first output of a decode is about its KV"
        stages = self.decode.kv_stages.pop(leg, [])
        assert stages in ([], [KvPulling, KvArrived]), "there are none if all blocks were cached"
        self.num_computed_at_decode += received.num_computed_tokens
        self.num_handed_over += 1
        self.last_received = received
        tokens: list[int] = []
        while not isinstance(output := await self.decode.next_output(leg), Finished):
            if isinstance(output, Failed):
                raise LegFailed(output)
            assert isinstance(output, Tokens), output
            tokens += output.token_ids
        del self.decode.legs[leg]
        return tokens

    async def start_decode(
        self,
        prompt: Sequence[int],
        token: int | None,
        ticket: Ticket,
        sampling: Sampling,
        deadline_s: float = PULL_DEADLINE_S,
    ) -> int:
        """Start a decode, and return its leg."""
        host = self.decode
        theirs, ours = len(ticket.addresses), host.info.num_ranks
        share = rank_bytes(ticket.model_fingerprint, ticket.kv_bytes, theirs, ours)
        assert share is not None, "the ranks cannot share the heads"
        landing = await _reserve(host, host.landing, share)
        leg = self.next_leg(host)
        host.landings[leg] = landing
        rest = replace(
            sampling,
            max_tokens=sampling.max_tokens - 1,
            num_logprobs=None,
            num_prompt_logprobs=None,
            num_drawn=sampling.num_drawn + 1,
        )
        host.engine.decode(
            DecodeJob(
                leg,
                ticket.request_id,
                0,
                array("I", prompt),
                token,
                ticket,
                landing,
                rest,
                deadline_s,
                self.root(),
                adapter=self.adapter,
                images=tuple(replace(image, data=b"") for image in self.images),
                priority=self.priority,
            )
        )
        return leg


async def locally(
    host: Host,
    prompt: Sequence[int],
    sampling: Sampling,
    adapter: Adapter | None = None,
    images: tuple[PromptImage, ...] = (),
) -> list[int]:
    """The whole answer of one engine, which does both phases as a fusion instance does.

    Raises LegFailed.
    """
    leg = Pair(host, host).next_leg(host)
    prompt = array("I", prompt)
    host.engine.prefill(PrefillJob(leg, "r", 0, prompt, sampling, adapter=adapter, images=images))
    return await whole_answer(host, leg)


async def whole_answer(host: Host, leg: int) -> list[int]:
    """The tokens of a leg that draws the whole answer. Raises LegFailed."""
    first = await host.next_output(leg)
    if isinstance(first, Failed):
        raise LegFailed(first)
    assert isinstance(first, Prefilled), first
    tokens, is_over = [first.token], first.finish_reason is not None
    while not is_over:
        output = await host.next_output(leg)
        is_over = isinstance(output, Finished)
        if isinstance(output, Tokens):
            tokens += output.token_ids
    return tokens


async def _reserve(host: Host, arena: ArenaAllocator, length: int) -> ArenaRange:
    """Reserve as the admission core does, but wait for space instead of refusing the request."""
    found: list[ArenaRange] = []

    def reserved() -> bool:
        taken = arena.reserve(length)
        if taken is not None:
            found.append(ArenaRange(taken.offset, taken.length))
        return taken is not None

    await host.until(reserved, 120)
    return found[0]
