"""What an engine is to the mesh: it takes jobs, and yields outputs in batches, one per step.

An engine never queues. The instance's admission core reserves a slot and the bytes before a job
arrives, so a job starts at the engine's next step. Jobs are named by the host's `leg` number. For
every job the engine emits exactly one terminal output: `Finished`, `Failed`, `Pooled`, `Encoded`,
or a `Prefilled` that carries a ticket or a finish reason. An aborted job has no terminal output:
after `abort` returns, only the end of its ranges is emitted for that leg (`TicketClosed`,
`LandingFreed`). An output that was emitted before the abort may still be read. After a `Failed`, or
a `Prefilled` without a ticket, no `TicketClosed` follows, unless `TicketOpened` came before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.adapters.fit import AdapterFacts
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.core.instance.arena import ArenaRange as ArenaRange  # noqa: PLC0414 - of the jobs
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.core.kv.transfer.ticket import Ticket as Ticket  # noqa: PLC0414  # part of the jobs
from pdmesh.core.model import PeerId
from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.errors import ConstraintUnsatisfiable
from pdmesh.kv.tiers.report import TierReport


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `num_logprobs` None means none.

    The last `num_drawn` tokens of the prompt belong to the answer: an earlier job drew them, on any
    engine. They count as output: a draw with a seed depends on the seed and on the token's position
    in the answer, and `shaping` and `constraint` are about all of the answer. `stop_token_ids`
    include the model's EOS tokens unless these are to be ignored. `ignore_eos` matters only to an
    engine that also adds an EOS token of its own.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with `num_logprobs`: these, not the likeliest
    num_drawn: int = 0
    shaping: LogitShaping = UNSHAPED
    num_prompt_logprobs: int | None = None  # not None: all of the prompt is computed
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), likeliest first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A row for each token of a prompt from the second on: the token, then the `num_top` likeliest.

    `ranks` are those of the prompt's own tokens; 1 is the likeliest.
    """

    num_top: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ranks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Compute a prompt, draw token 1, and stage the KV in `staging` under `ticket_id`.

    `is_per_layer` (S48): the ticket is open before the prompt is computed (`TicketOpened`), and
    each layer is staged as it is computed. Otherwise the prompt is staged whole, in time for
    `Prefilled`.

    `staging` is None when the job is local (fusion): the engine continues with decoding and emits
    `Tokens`. A job that ends with its first token (max_tokens 1, or a stop token) hands on no KV.
    """

    leg: int
    request_id: str
    attempt: int
    prompt: array[int]
    sampling: Sampling
    ticket_id: str = field(default="", repr=False)
    staging: ArenaRange | None = None
    is_per_layer: bool = False
    cache_salt: str = ""
    block_hashes: tuple[bytes, ...] = ()
    traceparent: str = ""
    adapter: Adapter | None = None
    images: tuple[PromptImage, ...] = ()
    priority: int = DEFAULT_PRIORITY  # a lower number is more urgent
    awaits_embeddings: bool = False  # of its images: `embedded` says which encoder holds them


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Pull a ticket's KV into `landing`, scatter it into blocks, and continue from `first_token`.

    `sampling.max_tokens` counts the tokens after `first_token`. `deadline_s` bounds the wait for
    the pull's turn, and again the pull itself. `stall_s` bounds the sender's silence during the
    pull, once prefill is done. `first_token` is None while prefill still computes: then the pull
    does not wait for a turn, `join` brings the token, and the job begins to draw when it has the
    token and the KV.
    """

    leg: int
    request_id: str
    attempt: int
    prompt: array[int]
    first_token: int | None
    ticket: Ticket
    landing: ArenaRange
    sampling: Sampling
    deadline_s: float
    cache_salt: str = ""
    block_hashes: tuple[bytes, ...] = ()
    traceparent: str = ""
    stall_s: float = math.inf
    adapter: Adapter | None = None
    images: tuple[PromptImage, ...] = ()  # without their data: their KV is pulled
    priority: int = DEFAULT_PRIORITY  # as in PrefillJob


def hands_on(job: PrefillJob, max_model_len: int) -> bool:
    """Whether the job's KV goes elsewhere.

    A job that surely ends with its first token hands on no KV.
    """
    has_room = len(job.prompt) + 1 < max_model_len
    return job.staging is not None and job.sampling.max_tokens > 1 and has_room


@dataclass(frozen=True, slots=True)
class TicketOpened:
    """The KV of a per-layer job may be pulled from now on, layer by layer as it is computed.

    It precedes every other output of the leg.
    """

    leg: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill is done. Terminal when `finish_reason` is set or `ticket` is."""

    leg: int
    token: int
    ticket: Ticket | None
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class KvPulling:
    """The job begins to pull its KV; the pull ends within its deadline.

    It is not emitted for a job that finds its KV here already.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The pull succeeded, and the job waits for a place in a step.

    It is left out if `KvReceived` follows at once.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class KvReceived:
    """The job's KV is in its blocks, verified; `num_computed_tokens` were computed, not pulled.

    For `waited_s` of `duration_s`, the job waited only for bytes: prefill was done, and its pull
    had begun.
    """

    leg: int
    kv_bytes: int
    duration_s: float
    num_computed_tokens: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that one job drew in this step, usually one."""

    leg: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One token for each of many jobs, in place of `Tokens`: parallel sequences of equal length.

    For engines that draw thousands of tokens per second; the same `legs` object may serve many
    steps.
    """

    legs: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    leg: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed and holds nothing any more.

    `reason` is as in errors.py; a retry goes to another instance. `cause`: the KV agent's reason
    for a failed KV transfer (`core.kv.transfer.ticket.PullFailure`).
    """

    leg: int
    reason: str
    message: str
    is_retryable: bool = True
    cause: str = ""


def constraint_failed(leg: int) -> Failed:
    """No engine can continue the answer: the constraint does not compile, or allows no token.

    The message does not quote the grammar, which a client wrote.
    """
    message = "the constraint cannot be compiled, or allows no token any more"
    return Failed(leg, ConstraintUnsatisfiable.default_reason, message, is_retryable=False)


@dataclass(frozen=True, slots=True)
class TicketClosed:
    """Staged KV was taken, released, or its lease ended: its slot and arena range are free.

    It is emitted exactly once for each job that got a `staging` range, unless the job ended by
    `Failed` or with its first token. For an aborted job it is the only output after `abort`. A
    ticket that `TicketOpened` announced is closed however the job ends. It may be closed before the
    job ends, if a decode has taken the KV.
    """

    ticket_id: str
    reason: str  # taken, released, expired, failed


@dataclass(frozen=True, slots=True)
class LandingFreed:
    """No late write can reach the job's landing range any more; the host may reserve it again.

    It is emitted exactly once for each DecodeJob, aborted and failed jobs included, perhaps last.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class PoolJob:
    """Make vectors or scores of `inputs`. Answered by `Pooled` or `Failed`.

    `first_lengths`: for pairs of texts, how many tokens of each input belong to the first text.
    `num_dimensions` 0: the model's own number. `use_activation` None: the model's default.
    """

    leg: int
    request_id: str
    task: PoolingTask
    inputs: tuple[array[int], ...]
    first_lengths: tuple[int, ...] = ()
    num_dimensions: int = 0
    use_activation: bool | None = None
    cache_salt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Pooled:
    """`values`: little-endian float32, `num_values` of each input, in order."""

    leg: int
    values: bytes
    num_values: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Make the embeddings of images and hold them for others. Answered by `Encoded` or `Failed`."""

    leg: int
    request_id: str
    images: tuple[PromptImage, ...]
    cache_salt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The embeddings of all images of the job are here; `num_computed` were made for this job."""

    leg: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """Block names that one tier evicted and stored. Apply: clear, then remove, then store."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_cleared: bool = False
    tier: Tier = Tier.ENGINE


@dataclass(frozen=True, slots=True)
class TiersReported:
    """What the tiers below the engine's blocks did since the last report, except
    `BlocksChanged`.
    """

    report: TierReport


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """A LoRA adapter was loaded or unloaded, or could not be loaded."""

    loaded: tuple[str, ...]  # digests of those that are loaded now
    event: str  # loaded, unloaded, failed
    seconds: float = 0.0  # how long loading took


Output = (
    TicketOpened
    | Prefilled
    | KvPulling
    | KvArrived
    | KvReceived
    | Tokens
    | TokenBatch
    | Finished
    | Failed
    | TicketClosed
    | LandingFreed
    | Pooled
    | Encoded
    | BlocksChanged
    | TiersReported
    | AdaptersChanged
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The loaded engine, as published in the instance's registry record."""

    engine: str  # vllm or sim
    model: str
    model_fingerprint: str
    block_size: int  # tokens
    num_kv_blocks: int
    kv_bytes_per_token: int  # all ranks together
    max_model_len: int
    num_ranks: int = 1
    supports_logprobs: bool = False
    supports_constraints: bool = False
    unsupported_shaping: tuple[str, ...] = ()  # fields of LogitShaping, logprob_token_ids
    kv_addresses: tuple[str, ...] = field(
        default=(), repr=False
    )  # KV transport address of each rank
    max_adapters: int = 0  # LoRA adapters that it holds at once; 0: it takes none
    pooling: PoolingFacts | None = None  # of a pooling engine
    images: ImageFacts | None = None  # None: the model takes none
    kv_path: str = ""  # where KV waits and lands, and why; empty: it hands on none
    fetches_embeddings: bool = False  # of images: it takes jobs that await an encoder
    windows: tuple[int, ...] = ()  # by layer, in tokens; 0: it needs all; (): all layers do


@dataclass(frozen=True, slots=True)
class KvPeer:
    """One incarnation of an instance that KV may come from.

    It has the KV transport address of each rank, in rank order.
    """

    instance_id: str
    incarnation: int
    addresses: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocks of a chain that a peer's host pool holds, and that a prompt may soon need.

    `chance`: how likely that is, from 0 to 1.
    """

    names: tuple[bytes, ...]
    cache_salt: str
    peer: KvPeer
    chance: float


@dataclass(frozen=True, slots=True)
class SessionHint:
    """What a client said of its session, whose last prompt and answer are the blocks `names`.

    `tenant`: a digest of the session's tenant, for whom holds are bounded. `hold_s`: for how long
    the blocks are to be evicted last, if it has paused.
    """

    session: str
    state: SessionState
    names: tuple[bytes, ...]
    tenant: str
    hold_s: float


@dataclass(slots=True)
class EngineStats:
    """`num_signs` grows while the engine computes, even within a long step, or loads an adapter.

    It stands still while the engine is idle or hangs.
    """

    num_running: int = 0
    num_kv_blocks_free: int = 0
    num_signs: int = 0
    num_tokens: int = 0  # computed since the start
    avoided_encoders: tuple[PeerId, ...] = ()  # it fetches no embeddings from them now
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """An engine hosted by one instance. All methods are called on the host's event loop."""

    async def start(self) -> EngineInfo:
        """Load the model and open the KV transport.

        Raises EngineFailed with a cause that an operator can act on.
        """
        ...

    async def stop(self) -> None:
        """Free everything; idempotent; bounded in time."""
        ...

    def prefill(self, job: PrefillJob) -> None: ...

    def decode(self, job: DecodeJob) -> None: ...

    def join(self, leg: int, first_token: int) -> None:
        """Give token 1 to a decode that was started without it.

        Ignored for a leg that is unknown or has its token.
        """
        ...

    def embedded(self, leg: int, encoder: KvPeer | None) -> None:
        """The embeddings that a prefill awaits are at `encoder`.

        None, or an encoder that has lost them: the engine makes them itself. Ignored for a leg that
        awaits none.
        """
        ...

    def abort(self, leg: int) -> None:
        """Stop a job in any state, its ticket included. Unknown legs are ignored."""
        ...

    def release(self, ticket_id: str) -> None:
        """Free staged KV that no peer will pull; answered by TicketClosed.

        Ignores unknown tickets.
        """
        ...

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None:
        """Pull a probe over each connection that KV from the peer would take (S16).

        Raises KvTransferFailed, KvFormatMismatch.
        """
        ...

    def forget_peer(self, peer: KvPeer) -> None:
        """The peer has left: drop the connections to it as soon as no pull uses them (S26)."""
        ...

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        """Evict no block of these prefixes from the tiers below the engine's own blocks.

        They replace the prefixes of the last call.
        """
        ...

    def prefetch(self, wanted: Prefetch) -> None:
        """Bring a peer's blocks into the tiers below the engine's own, if that saves time.

        An engine without tiers ignores it.
        """
        ...

    def note_session(self, hint: SessionHint) -> None:
        """Evict a session's blocks last, like others, or first, as its client said.

        This is about the tiers below the engine's own blocks. An engine without tiers ignores it.
        """
        ...

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        """The facts of the LoRA adapter in this folder, if the engine could load it.

        Raises AdapterUnusable with what an operator can act on.
        """
        ...

    def keep_adapters(self, digests: Collection[str]) -> None:
        """These adapters are registered: others are unloaded as soon as no job uses them."""
        ...

    def outputs(self) -> AsyncIterator[list[Output]]:
        """Batches of outputs, one per engine step, in order.

        Raises EngineFailed if the engine dies.
        """
        ...

    async def ping(self) -> None:
        """Returns once the engine's own loop has handled the ping, busy or idle.

        It never returns if the engine hangs.
        """
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class PoolingEngine(Protocol):
    """An engine of the role pooling: it is an `Engine` that takes these jobs and no others."""

    def pool(self, job: PoolJob) -> None: ...


@runtime_checkable
class EncoderEngine(Protocol):
    """An engine of the role encoder: it is an `Engine` that takes these jobs and no others."""

    def encode(self, job: EncodeJob) -> None: ...
