"""The interface of an engine: it takes jobs, and yields outputs in batches, one per step.

No job waits for a slot or for memory, because the instance's admission reserves both before the job
arrives. A job has the number of its leg, which is the request's stay on this instance. A prefill
*stages* KV: it copies the KV to a reserved range of memory, from which a decode pulls it. A
*ticket* is the right to pull one prompt's staged KV. The range of memory into which the decode
pulls is its *landing*.

For every job the engine emits exactly one terminal output: `Finished`, `Failed`, `Pooled`,
`Encoded`, or a `Prefilled` with a ticket or a finish reason. An aborted job has no terminal output.
After `abort` returns, the engine emits only `TicketClosed` or `LandingFreed` for the job. They
report that the job's memory is free. The reader may still receive outputs from before the abort.
After `Failed`, or `Prefilled` without a ticket, `TicketClosed` follows only if the KV was to be
handed on per layer.
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
    """How tokens are drawn. With `temperature` 0, sampling is greedy.

    An earlier job, on any engine, may have drawn the beginning of the answer. These tokens are the
    last `num_drawn` tokens of the prompt (in a `DecodeJob`, of the prompt and token 1), but they
    count as output: `shaping` and `constraint` apply to the whole answer, and a seeded draw depends
    on the seed and the token's position in the answer. `stop_token_ids` include the model's EOS
    tokens, unless the request ignores EOS. `ignore_eos` is for engines that also stop at an EOS
    token that is not in `stop_token_ids`.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: no log probabilities
    logprob_token_ids: tuple[int, ...] = ()  # report these tokens instead of the likeliest ones
    num_drawn: int = 0
    shaping: LogitShaping = UNSHAPED
    num_prompt_logprobs: int | None = None  # if set, no part of the prompt comes from a cache
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), likeliest first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of a prompt's tokens, in rows of 1 + `num_top` entries.

    There is one row for each token from the second on. A row begins with the prompt's own token,
    followed by the `num_top` likeliest tokens. `ranks` has one entry per row: the rank of the
    prompt's own token, where 1 is the likeliest.
    """

    num_top: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ranks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Compute a prompt, draw token 1, and stage the KV in `staging` under `ticket_id`.

    If `is_per_layer` (S48), the engine opens the ticket before it computes the prompt
    (`TicketOpened`), and stages each layer when the layer is computed. Otherwise the engine stages
    the whole prompt before it emits `Prefilled`.

    `staging` is None for a job that continues here (fusion): after token 1, the engine decodes and
    emits `Tokens`. If the answer ends with token 1, no decode pulls the KV, and `Prefilled` has no
    ticket.
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
    awaits_embeddings: bool = False  # an encoder makes the images' embeddings, see `embedded`


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Pull a ticket's KV into `landing`, scatter it into blocks, and continue from `first_token`.

    `sampling.max_tokens` counts the tokens after `first_token`. `deadline_s` bounds the wait for
    the pull's turn, and then, from zero again, the pull itself. `stall_s` bounds the sender's
    silence during the pull, once prefill is done.

    `first_token` is None while prefill still computes. In this case the pull does not wait for a
    turn, and `join` passes the token later. The job draws once it has both the token and the KV.
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
    images: tuple[PromptImage, ...] = ()  # without the images' data, since the KV is pulled
    priority: int = DEFAULT_PRIORITY  # as in PrefillJob


def hands_on(job: PrefillJob, max_model_len: int) -> bool:
    """Whether a decode on another instance is to pull the job's KV.

    The KV of a job that must end with token 1 is not needed elsewhere.
    """
    has_room = len(job.prompt) + 1 < max_model_len
    return job.staging is not None and job.sampling.max_tokens > 1 and has_room


@dataclass(frozen=True, slots=True)
class TicketOpened:
    """A decode may pull the KV of a per-layer job from now on, each layer once it is computed.

    This is the first output of the leg.
    """

    leg: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill is done. This output is terminal if `finish_reason` or `ticket` is set."""

    leg: int
    token: int
    ticket: Ticket | None
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class KvPulling:
    """The job begins to pull its KV. The pull ends within the job's deadline.

    This output is left out if the engine has all of the job's KV already.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The pull succeeded, and the job waits for room in a step.

    This output may be left out if `KvReceived` follows at once.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class KvReceived:
    """The job's KV is in its blocks, and verified.

    `num_computed_tokens` is the number of tokens whose KV this engine computed instead of pulling
    it. `waited_s` is the part of `duration_s` in which the job waited only for bytes: prefill was
    done, and the pull had begun.
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
    """One token for each of many jobs, instead of many `Tokens`. The two sequences are parallel.

    This form is for engines that draw thousands of tokens per second. An engine may pass the same
    `legs` object in many steps.
    """

    legs: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    leg: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed.

    The landing of a decode, and the staging range of a per-layer prefill, may be in use until
    `LandingFreed` or `TicketClosed`. `reason` is a reason of errors.py. If `is_retryable`, the
    request may be retried on another instance. `cause` is the KV agent's reason for a failed KV
    transfer (`core.kv.transfer.ticket.PullFailure`).
    """

    leg: int
    reason: str
    message: str
    is_retryable: bool = True
    cause: str = ""


def constraint_failed(leg: int) -> Failed:
    """The failure of a job whose constraint does not compile, or allows no token any more.

    A constraint is a grammar that the answer must follow. No other engine could continue the
    answer. The message does not quote the client's grammar.
    """
    message = "the constraint cannot be compiled, or allows no token any more"
    return Failed(leg, ConstraintUnsatisfiable.default_reason, message, is_retryable=False)


@dataclass(frozen=True, slots=True)
class TicketClosed:
    """Staged KV was pulled or released, or its lease ended. The job's slot and range are free.

    The engine emits this exactly once for each job that has a `staging` range, unless the job ended
    by `Failed` or with token 1. For an aborted job it is the only output after `abort`.

    For KV that is handed on per layer, the engine emits this however the job ends. If a decode has
    pulled all KV, the engine may emit this before the job ends.
    """

    ticket_id: str
    reason: str  # taken, released, expired, failed


@dataclass(frozen=True, slots=True)
class LandingFreed:
    """No late write can reach the job's landing range any more. The range may be reserved again.

    The engine emits this exactly once for each DecodeJob, even if the job was aborted or failed. It
    may come after the job's terminal output.
    """

    leg: int


@dataclass(frozen=True, slots=True)
class PoolJob:
    """Make vectors or scores of `inputs`. The answer is `Pooled` or `Failed`.

    If the inputs are pairs of texts, `first_lengths` has the number of tokens of each pair's first
    text. With `num_dimensions` 0, vectors have the model's own length. With `use_activation` None,
    the model's default applies.
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
    """`values` is little-endian float32: `num_values` numbers for each input, in order."""

    leg: int
    values: bytes
    num_values: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Make the embeddings of images, and hold them for prefills to fetch.

    The answer is `Encoded` or `Failed`.
    """

    leg: int
    request_id: str
    images: tuple[PromptImage, ...]
    cache_salt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """This engine holds the embeddings of all the job's images.

    It computed `num_computed` of them for this job, and had the others already.
    """

    leg: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """The names of blocks that one tier stored and evicted.

    A reader applies the change in this order: clear, remove, store.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_cleared: bool = False
    tier: Tier = Tier.ENGINE


@dataclass(frozen=True, slots=True)
class TiersReported:
    """Counters, times and faults of the KV tiers since the last report.

    The tiers below the engine keep KV in host memory, in peers' memory and in files.
    """

    report: TierReport


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """A LoRA adapter was loaded or unloaded, or could not be loaded."""

    loaded: tuple[str, ...]  # the digests of all adapters that are loaded now
    event: str  # loaded, unloaded, failed
    seconds: float = 0.0  # for `loaded`: how long copying and loading took


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
    """Facts about a loaded engine, for the instance's registry record."""

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
    max_adapters: int = 0  # most LoRA adapters loaded at once; 0: the engine takes no adapters
    pooling: PoolingFacts | None = None  # of a pooling engine
    images: ImageFacts | None = None  # None: the model takes no images
    kv_path: str = ""  # of vLLM: where KV is staged and lands, and why; empty: no KV is handed on
    fetches_embeddings: bool = False  # the engine takes jobs whose images an encoder encodes
    # Each layer's attention window, in tokens. 0: the layer needs all tokens; (): all layers do.
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvPeer:
    """One incarnation of an instance from which KV may be pulled.

    `addresses` has the KV transport address of each rank, in rank order.
    """

    instance_id: str
    incarnation: int
    addresses: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Consecutive blocks of a prompt, which a peer's host memory holds and a request may need soon.

    `chance` is the probability that a request will need the blocks.
    """

    names: tuple[bytes, ...]
    cache_salt: str
    peer: KvPeer
    chance: float


@dataclass(frozen=True, slots=True)
class SessionHint:
    """A client's report that its chat session has paused, resumed or ended.

    `names` are the blocks of the session's last prompt and answer. While a session is paused, its
    blocks are held: for up to `hold_s`, they are evicted last. `tenant` is a digest of the
    session's tenant; the number of held blocks is bounded per tenant.
    """

    session: str
    state: SessionState
    names: tuple[bytes, ...]
    tenant: str
    hold_s: float


@dataclass(slots=True)
class EngineStats:
    """`num_signs` counts signs of work, from which callers see that the engine does not hang.

    The number grows even during a long step, and while an adapter is loaded. It stays the same
    while the engine is idle or hangs.
    """

    num_running: int = 0
    num_kv_blocks_free: int = 0
    num_signs: int = 0
    num_tokens: int = 0  # computed since the start
    avoided_encoders: tuple[PeerId, ...] = ()  # encoders from which nothing is fetched for a while
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """The engine of one instance. All methods are called on the instance's event loop."""

    async def start(self) -> EngineInfo:
        """Load the model and open the KV transport.

        Raises EngineFailed with a cause that an operator can act on.
        """
        ...

    async def stop(self) -> None:
        """Free everything, within a bounded time. Idempotent."""
        ...

    def prefill(self, job: PrefillJob) -> None: ...

    def decode(self, job: DecodeJob) -> None: ...

    def join(self, leg: int, first_token: int) -> None:
        """Give token 1 to a decode that was started without the token.

        Ignored for a leg that is unknown or has the token already.
        """
        ...

    def embedded(self, leg: int, encoder: KvPeer | None) -> None:
        """Tell a prefill which encoder holds the embeddings of its images.

        The engine makes the embeddings itself if `encoder` is None or does not have them any more.
        Ignored for a leg that does not await embeddings.
        """
        ...

    def abort(self, leg: int) -> None:
        """Stop a job in any state, and close its ticket. Unknown legs are ignored."""
        ...

    def release(self, ticket_id: str) -> None:
        """Free staged KV that no peer will pull. The answer is TicketClosed.

        Unknown tickets are ignored.
        """
        ...

    async def verify_peer(self, peer: KvPeer, timeout_s: float) -> None:
        """Pull a probe over each connection that KV from the peer would take (S16).

        Raises KvTransferFailed, KvFormatMismatch.
        """
        ...

    def forget_peer(self, peer: KvPeer) -> None:
        """Close the connections to a peer that has left, once no pull uses them (S26)."""
        ...

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        """Evict no block of these prefixes from the tiers below the engine's own blocks.

        A later call replaces these prefixes.
        """
        ...

    def prefetch(self, wanted: Prefetch) -> None:
        """Fetch a peer's blocks into the tiers below the engine's own blocks, if that saves time.

        An engine without tiers ignores this call.
        """
        ...

    def note_session(self, hint: SessionHint) -> None:
        """Change how soon a session's blocks are evicted: last, like other blocks, or first.

        This concerns only the tiers below the engine's own blocks. An engine without tiers ignores
        this call.
        """
        ...

    async def inspect_adapter(self, path: str) -> AdapterFacts:
        """Read the facts of the LoRA adapter in this folder, and check that the engine can load it.

        Raises AdapterUnusable with a cause that an operator can act on.
        """
        ...

    def keep_adapters(self, digests: Collection[str]) -> None:
        """Unload all adapters but those with these digests, each as soon as no job uses it."""
        ...

    def outputs(self) -> AsyncIterator[list[Output]]:
        """Batches of outputs, one per engine step, in order.

        Raises EngineFailed if the engine dies.
        """
        ...

    async def ping(self) -> None:
        """Return once the engine's own loop has handled the ping, whether it is busy or idle.

        If the engine hangs, this never returns.
        """
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class PoolingEngine(Protocol):
    """The engine of a pooling instance: an `Engine` that takes only this kind of job."""

    def pool(self, job: PoolJob) -> None: ...


@runtime_checkable
class EncoderEngine(Protocol):
    """The engine of an encoder: an `Engine` that takes only this kind of job."""

    def encode(self, job: EncodeJob) -> None: ...
