"""Converts gateways' commands and instances' events between protobuf and the engine's types.

The commands are checked. A command that no correct gateway sends raises InvalidRequest. A ticket is
a decode's right to pull the KV of one prompt.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.images.prompt_image import DIGEST_BYTES, MAX_IMAGES, PromptImage
from pdmesh.core.instance.admission import Capacity, RefusalReason, Refused
from pdmesh.core.instance.urgency import DEFAULT_PRIORITY, MAX_PRIORITY
from pdmesh.core.kv.layout import compatibility as kv_format
from pdmesh.core.kv.layout.cache_groups import kv_bytes
from pdmesh.core.kv.prefix.block_hash import HASH_BYTES, tokens_from_bytes
from pdmesh.core.kv.tiers.session_holds import MAX_SESSION_CHARS, MAX_SESSION_NAMES, SessionState
from pdmesh.core.kv.transfer.ticket import MAX_TICKET_ID
from pdmesh.core.pooling.batches import MAX_BATCH_INPUTS
from pdmesh.core.pooling.facts import PoolingTask
from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import MAX_LOGPROB_IDS, UNSHAPED, LogitShaping
from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from pdmesh.engine.base import (
    Encoded,
    Failed,
    FinishReason,
    KvPeer,
    Pooled,
    Prefetch,
    Prefilled,
    Sampling,
    SessionHint,
    Ticket,
    TokenLogprob,
)
from pdmesh.errors import InvalidRequest
from pdmesh.kv.tiers.peers import MAX_NAMES
from pdmesh.v1 import common_pb2, instance_service_pb2
from pdmesh.v1.common_pb2 import (
    SESSION_STATE_DONE,
    SESSION_STATE_PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED,
)
from pdmesh.v1.instance_service_pb2 import (
    Embedded,
    Encode,
    Pool,
    Prefill,
    RejectReason,
    SessionEvent,
    Start,
)
from pdmesh.v1.instance_service_pb2 import Prefetch as PrefetchMessage
from pdmesh.v1.instance_service_pb2 import SessionHint as SessionHintMessage

_FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_SESSION_STATES = {
    SESSION_STATE_PAUSED_FOR_TOOL: SessionState.PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED: SessionState.RESUMED,
    SESSION_STATE_DONE: SessionState.DONE,
}
_ANY_TOKEN = 1 << 32
_TASKS = {
    common_pb2.POOLING_TASK_EMBED: PoolingTask.EMBED,
    common_pb2.POOLING_TASK_CLASSIFY: PoolingTask.CLASSIFY,
}
_REJECT = {r: RejectReason.Value(f"REJECT_REASON_{r.name}") for r in RefusalReason}


def sampling_from_proto(m: common_pb2.SamplingParams) -> Sampling:
    """Raises InvalidRequest with the field's name."""
    if m.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="sampling.max_tokens")
    if not (math.isfinite(m.temperature) and m.temperature >= 0):
        raise InvalidRequest(
            "temperature must be finite and at least 0", field="sampling.temperature"
        )
    if not 0 < m.top_p <= 1:
        raise InvalidRequest("top_p must be above 0, at most 1", field="sampling.top_p")
    if len(m.logprob_token_ids) > MAX_LOGPROB_IDS:
        message = f"must have at most {MAX_LOGPROB_IDS} tokens"
        raise InvalidRequest(message, field="sampling.logprob_token_ids")
    return Sampling(
        max_tokens=m.max_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        seed=m.seed if m.HasField("seed") else None,
        stop_token_ids=frozenset(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        num_logprobs=m.num_logprobs if m.HasField("num_logprobs") else None,
        logprob_token_ids=tuple(m.logprob_token_ids),
        num_drawn=m.num_drawn,
        num_prompt_logprobs=m.num_prompt_logprobs if m.HasField("num_prompt_logprobs") else None,
        shaping=shaping_from_proto(m.shaping) if m.HasField("shaping") else UNSHAPED,
        constraint=constraint_from_proto(m.constraint) if m.HasField("constraint") else None,
    )


def constraint_from_proto(m: common_pb2.Constraint) -> Constraint:
    """Raises InvalidRequest with the field's name."""
    constraint = Constraint(m.grammar, tuple(m.begins_after))
    constraint.check()
    return constraint


def shaping_from_proto(m: common_pb2.LogitShaping) -> LogitShaping:
    """Raises InvalidRequest with the field's name.

    Token ids are checked only as uint32. The engine checks them against the vocabulary's size.
    """
    shaping = LogitShaping(
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty if m.HasField("repetition_penalty") else 1.0,
        top_k=m.top_k,
        min_p=m.min_p,
        min_tokens=m.min_tokens,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        bad_words=tuple(tuple(word.token_ids) for word in m.bad_words),
        allowed_token_ids=tuple(m.allowed_token_ids),
        thinking_token_budget=thinking_budget_from_proto(m.thinking_token_budget)
        if m.HasField("thinking_token_budget")
        else None,
    )
    shaping.check(_ANY_TOKEN)
    return shaping


def thinking_budget_from_proto(m: common_pb2.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(m.num_tokens, ThinkingMarks(tuple(m.begin), tuple(m.end)))


def prompt_from_bytes(data: bytes, field: str = "prompt_token_ids") -> array[int]:
    """Raises InvalidRequest unless the bytes are one or more uint32."""
    if not data or len(data) % 4:
        raise InvalidRequest("must be one or more uint32", field=field)
    return tokens_from_bytes(data)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The fields that `Prefill` and `Start` have in common, checked."""

    prompt: array[int]
    sampling: Sampling
    block_hashes: tuple[bytes, ...]
    adapter: Adapter | None = None
    images: tuple[PromptImage, ...] = ()
    priority: int = DEFAULT_PRIORITY


def parse(m: Prefill | Start, capacity: Capacity) -> Parsed:
    """Raises InvalidRequest.

    A command has one hash for each full block of the prompt, or no hashes. Without hashes, the
    request shares no KV with others.
    """
    prompt = prompt_from_bytes(m.prompt_token_ids)
    hashes = tuple(m.block_hashes)
    if hashes and len(hashes) != len(prompt) // capacity.block_size:
        raise InvalidRequest("must have one hash for each full block", field="block_hashes")
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise InvalidRequest(f"each hash must have {HASH_BYTES} bytes", field="block_hashes")
    if isinstance(m, Start):
        _check_ticket(m.ticket, len(prompt), capacity)
    if m.sampling.num_drawn > len(prompt):
        text = "must not exceed the prompt's tokens, of which the drawn ones are part"
        raise InvalidRequest(text, field="sampling.num_drawn")
    adapter = adapter_from_proto(m.adapter) if m.HasField("adapter") else None
    images = images_from_proto(m, len(prompt)) if m.images else ()
    if isinstance(m, Prefill) and m.awaits_embeddings and not images:
        raise InvalidRequest("there are no images", field="awaits_embeddings")
    priority = priority_from_proto(m)
    return Parsed(prompt, sampling_from_proto(m.sampling), hashes, adapter, images, priority)


def priority_from_proto(m: Prefill | Start) -> int:
    """Raises InvalidRequest. Older gateways do not set the priority."""
    if not m.HasField("priority"):
        return DEFAULT_PRIORITY
    if m.priority > MAX_PRIORITY:
        raise InvalidRequest(f"must be at most {MAX_PRIORITY}", field="priority")
    return m.priority


def images_from_proto(
    m: Prefill | Start | Encode, num_tokens: int | None
) -> tuple[PromptImage, ...]:
    """The images of a prompt, in order, each within the prompt. Raises InvalidRequest.

    `num_tokens` is the prompt's length, or None if it is not known. The digests come from the
    gateway, and this function does not hash the images' data again.
    """
    images = tuple(
        PromptImage(each.position, each.num_tokens, each.digest, each.data, each.num_rows)
        for each in m.images
    )
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"at most {MAX_IMAGES} images", field="images")
    end = 0
    for image in images:
        if image.position < end or not image.num_tokens or len(image.digest) != DIGEST_BYTES:
            raise InvalidRequest("not images in order, each with its digest", field="images")
        if image.num_rows and image.num_tokens % image.num_rows:
            raise InvalidRequest("an image's rows are not of one length", field="images")
        end = image.position + image.num_tokens
        if bool(image.data) == isinstance(m, Start):
            raise InvalidRequest(
                "prefills and encoders get the images' data, decodes do not", field="images"
            )
    if num_tokens is not None and end > num_tokens:
        raise InvalidRequest("an image ends after the prompt", field="images")
    return images


@dataclass(frozen=True, slots=True)
class PoolAsked:
    task: PoolingTask
    inputs: tuple[array[int], ...]
    first_lengths: tuple[int, ...]


def pool_from_proto(m: Pool) -> PoolAsked:
    """Raises InvalidRequest with the field's name."""
    task = _TASKS.get(m.task)
    if task is None:
        raise InvalidRequest("unknown task", field="task")
    if not 1 <= len(m.inputs) <= MAX_BATCH_INPUTS:
        raise InvalidRequest(f"must have 1 to {MAX_BATCH_INPUTS} inputs", field="inputs")
    inputs = tuple(prompt_from_bytes(data, "inputs") for data in m.inputs)
    firsts = tuple(m.first_lengths)
    if firsts and len(firsts) != len(inputs):
        raise InvalidRequest("must have one length for each input", field="first_lengths")
    if any(first > len(tokens) for first, tokens in zip(firsts, inputs, strict=False)):
        raise InvalidRequest("a length must not exceed that of its input", field="first_lengths")
    return PoolAsked(task, inputs, firsts)


def encode_from_proto(m: Encode) -> tuple[PromptImage, ...]:
    """Raises InvalidRequest with the field's name."""
    if not m.images:
        raise InvalidRequest("must have images", field="images")
    return images_from_proto(m, None)


def encoder_from_proto(m: Embedded) -> KvPeer | None:
    """The encoder that holds the embeddings; None if there is none."""
    if not (m.HasField("encoder") and m.kv_addresses):
        return None
    return KvPeer(m.encoder.instance_id, m.encoder.incarnation, tuple(m.kv_addresses))


def prefetch_from_proto(m: PrefetchMessage) -> Prefetch:
    """Raises InvalidRequest with the field's name."""
    if any(len(name) != HASH_BYTES for name in m.block_hashes):
        raise InvalidRequest(
            f"each hash must have {HASH_BYTES} bytes", field="prefetch.block_hashes"
        )
    if not 0.0 <= m.chance <= 1.0:
        raise InvalidRequest("must be from 0 to 1", field="prefetch.chance")
    peer = KvPeer(m.peer.instance_id, m.peer.incarnation, tuple(m.kv_addresses))
    return Prefetch(tuple(m.block_hashes[:MAX_NAMES]), m.cache_salt, peer, m.chance)


def session_hint_from_proto(m: SessionHintMessage) -> SessionHint:
    """Raises InvalidRequest with the field's name."""
    if any(len(name) != HASH_BYTES for name in m.block_hashes):
        raise InvalidRequest(
            f"each hash must have {HASH_BYTES} bytes", field="session_hint.block_hashes"
        )
    if not 0 < len(m.session) <= MAX_SESSION_CHARS:
        message = f"must have 1 to {MAX_SESSION_CHARS} characters"
        raise InvalidRequest(message, field="session_hint.session")
    if len(m.tenant) > MAX_SESSION_CHARS:
        message = f"must have at most {MAX_SESSION_CHARS} characters"
        raise InvalidRequest(message, field="session_hint.tenant")
    if (state := _SESSION_STATES.get(m.state)) is None:
        raise InvalidRequest("is unknown", field="session_hint.state")
    names = tuple(m.block_hashes[:MAX_SESSION_NAMES])
    return SessionHint(m.session, state, names, m.tenant, m.hold_ms / 1000)


def encoded(key: int, output: Encoded) -> SessionEvent:
    event = SessionEvent(key=key)
    event.encoded.num_computed = output.num_computed
    return event


def pooled(key: int, output: Pooled) -> SessionEvent:
    event = SessionEvent(key=key)
    event.pooled.values = output.values
    event.pooled.num_values = output.num_values
    event.pooled.num_cached_tokens = output.num_cached_tokens
    return event


def adapter_from_proto(m: common_pb2.Adapter) -> Adapter:
    """Raises InvalidRequest with the field's name."""
    adapter = Adapter(m.name, m.digest, m.path)
    adapter.check()
    return adapter


def _check_ticket(ticket: common_pb2.Ticket, num_tokens: int, capacity: Capacity) -> None:
    """Check the ticket's numbers.

    A ticket with another fingerprint is not checked, because admission refuses it. The ticket's
    `kv_bytes` must be the number of bytes to transfer. For layers with windows or states, this is
    smaller than the number of reserved bytes.
    """
    if len(ticket.ticket_id.encode()) > MAX_TICKET_ID:
        raise InvalidRequest(f"must have at most {MAX_TICKET_ID} bytes", field="ticket.ticket_id")
    if ticket.model_fingerprint != capacity.model_fingerprint:
        return
    if not (ticket.ticket_id and ticket.addresses):
        raise InvalidRequest("the ticket is incomplete", field="ticket")
    expected = kv_format.rank_bytes(
        capacity.model_fingerprint,
        kv_bytes(num_tokens, capacity.block_size, capacity.block_bytes, capacity.windows),
        capacity.num_ranks,
        len(ticket.addresses),
    )
    if (ticket.num_tokens, ticket.kv_bytes) != (num_tokens, expected):
        raise InvalidRequest("the ticket belongs to another prompt", field="ticket")


def ticket_from_proto(m: common_pb2.Ticket) -> Ticket:
    return Ticket(
        ticket_id=m.ticket_id,
        request_id=m.request_id,
        attempt=m.attempt,
        instance_id=m.instance_id,
        incarnation=m.incarnation,
        model_fingerprint=m.model_fingerprint,
        num_tokens=m.num_tokens,
        kv_bytes=m.kv_bytes,
        addresses=tuple(m.addresses),
        lease_ms=m.lease_ms,
    )


def ticket_to_proto(ticket: Ticket) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        ticket_id=ticket.ticket_id,
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        instance_id=ticket.instance_id,
        incarnation=ticket.incarnation,
        model_fingerprint=ticket.model_fingerprint,
        num_tokens=ticket.num_tokens,
        kv_bytes=ticket.kv_bytes,
        addresses=ticket.addresses,
        lease_ms=ticket.lease_ms,
    )


def logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top_token_ids=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def accepted(key: int, ticket: Ticket) -> SessionEvent:
    return SessionEvent(
        key=key, accepted=instance_service_pb2.Accepted(ticket=ticket_to_proto(ticket))
    )


def rejected(key: int, refused: Refused) -> SessionEvent:
    event = SessionEvent(key=key)
    event.rejected.reason = _REJECT[refused.reason]
    event.rejected.retry_after_ms = refused.retry_after_ms
    event.rejected.detail = refused.detail
    return event


def first_token(key: int, output: Prefilled) -> SessionEvent:
    event = SessionEvent(key=key)
    event.first_token.token_id = output.token
    event.first_token.finish_reason = _FINISH[output.finish_reason]
    event.first_token.num_cached_tokens = output.num_cached_tokens
    if output.ticket is not None:
        event.first_token.ticket.CopyFrom(ticket_to_proto(output.ticket))
    if output.logprob is not None:
        event.first_token.logprob.CopyFrom(logprob_to_proto(output.logprob))
    if (prompt := output.prompt_logprobs) is not None:
        event.first_token.prompt_logprobs.num_top = prompt.num_top
        event.first_token.prompt_logprobs.token_ids.extend(prompt.token_ids)
        event.first_token.prompt_logprobs.logprobs.extend(prompt.logprobs)
        event.first_token.prompt_logprobs.ranks.extend(prompt.ranks)
    return event


def kv_advanced(key: int, stage: instance_service_pb2.KvStage.ValueType) -> SessionEvent:
    return SessionEvent(key=key, kv_advanced=instance_service_pb2.KvAdvanced(stage=stage))


def kv_received(key: int, kv_bytes: int, duration_s: float, num_computed: int) -> SessionEvent:
    event = SessionEvent(key=key)
    event.kv_received.kv_bytes = kv_bytes
    event.kv_received.duration_us = round(1e6 * duration_s)
    event.kv_received.num_computed_tokens = num_computed
    return event


def finished(key: int, reason: FinishReason) -> SessionEvent:
    event = SessionEvent(key=key)
    event.finished.finish_reason = _FINISH[reason]
    return event


def failed(key: int, output: Failed) -> SessionEvent:
    event = SessionEvent(key=key)
    event.failed.reason = output.reason
    event.failed.message = output.message
    event.failed.is_retryable = output.is_retryable
    return event
