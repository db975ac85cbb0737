"""Makes the protobuf messages of one choice, which go to the master and to instances.

The request core (`core.request`) decides what happens next, and returns each decision as an effect.
Most methods here turn one kind of effect into a message. A choice is one answer of a call, and a
leg is the choice's stay on one instance. An early decode is chosen as soon as a prefill has
accepted the choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.instance.urgency import MAX_PRIORITY
from pdmesh.core.request.events import AskPlan, SendPrefill, SendStart
from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.routing.adapter_names import AdaptedModel
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import Adapter, InstanceRecord, SamplingParams, Ticket
from pdmesh.v1.common_pb2 import Constraint as ConstraintMessage
from pdmesh.v1.common_pb2 import LogitShaping as LogitShapingMessage
from pdmesh.v1.instance_service_pb2 import Command, Encode, KvTransfer, Prefill, Start
from pdmesh.v1.instance_service_pb2 import PromptImage as PromptImageMessage
from pdmesh.v1.scheduler_service_pb2 import PlanQuery, PlanResult


@dataclass(slots=True)
class ChoiceIdentity:
    """A choice's ids in messages to instances and the master, its random seed, and its limits."""

    request_id: str
    index: int
    traceparent: str = ""
    seed: int | None = None
    max_tokens: int = 1
    deadline: float = 0.0  # in monotonic seconds
    handed: PlanResult | None = None  # the master's plan that came with the request, if any


class LegCommands:
    """Makes the messages of one choice.

    In the methods, `emitted` holds all tokens that the choice has emitted so far. `record` is the
    registry's record of the instance that receives the message, except in `encode`.
    """

    __slots__ = (
        "_adapter", "_constraint", "_identity", "_model", "_prompt", "_shaping", "_spec",
        "_stop_token_ids",
    )  # fmt: skip

    def __init__(
        self,
        spec: CallSpec,
        prompt: Prompt,
        identity: ChoiceIdentity,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._spec, self._prompt, self._identity = spec, prompt, identity
        self._model = spec.base_model
        self._stop_token_ids = stop_token_ids
        self._shaping = shaping_to_proto(spec.sampling.shaping)
        self._adapter = adapter_to_proto(spec.adapter)
        self._constraint = constraint_to_proto(spec.sampling.constraint)

    def plan_query(
        self,
        effect: AskPlan,
        reference: InstanceRecord | None,
        emitted: Sequence[int],
        num_remaining: int,
    ) -> PlanQuery:
        """The query that asks the master for instances.

        The query names the prompt's blocks as the instance `reference` does. If `reference` is
        None, the query names no blocks.
        """
        spec, prompt = self._spec, self._prompt
        return PlanQuery(
            request_id=self._identity.request_id,
            attempt=effect.attempt,
            model=self._model,
            adapter_digest=self._adapter.digest if self._adapter is not None else "",
            scenario=spec.scenario,
            block_hashes=prompt.hashes(reference, emitted) if reference else (),
            num_prompt_tokens=len(prompt.tokens) + len(emitted),
            max_tokens=num_remaining,
            chat_id=prompt.chat_key(spec.chat_id),
            excluded_instance_ids=effect.excluded,
            has_images=bool(prompt.images),
            traceparent=self._identity.traceparent,
        )

    def prefill(
        self,
        effect: SendPrefill,
        record: InstanceRecord,
        emitted: Sequence[int],
        kv_transfer: KvTransfer.ValueType,
        *,
        awaits_embeddings: bool = False,
    ) -> Command:
        replayed = emitted[: effect.num_replayed]
        command = Command()
        prefill = command.prefill
        num_prompt_logprobs = self._num_prompt_logprobs(len(replayed))
        self._fill_sampling(prefill.sampling, effect.max_tokens, len(replayed), num_prompt_logprobs)
        prefill.is_local = effect.to.is_local
        prefill.kv_transfer = kv_transfer
        prefill.awaits_embeddings = awaits_embeddings
        self._fill(prefill, effect, record, replayed)
        return command

    def encode(self, key: int, attempt: int, record: InstanceRecord) -> Command:
        """The command to an encoder to encode the images.

        `record` describes the instance that computes the prompt and fetches the embeddings.
        """
        prompt = self._prompt
        return Command(
            encode=Encode(
                key=key,
                request_id=self._identity.request_id,
                attempt=attempt,
                images=images_to_proto(prompt.images, with_data=True),
                remaining_ms=self._remaining_ms(),
                traceparent=self._identity.traceparent,
                cache_salt=prompt.root(record.model_fingerprint).hex(),
                model=self._model,
            )
        )

    def start(
        self,
        effect: SendStart,
        record: InstanceRecord,
        emitted: Sequence[int],
        prompt_compute_s: float,
    ) -> Command:
        """The command that starts a decode leg.

        The decode continues after the token that the prefill has drawn. An early decode is started
        before the prefill has drawn this token, and receives it later.
        """
        replayed = list(emitted[: effect.num_replayed])
        ticket = effect.ticket.wire
        assert isinstance(ticket, Ticket)
        num_drawn = len(replayed) + effect.is_early
        first_token = 0 if effect.is_early else replayed.pop()
        command = Command()
        start = command.start
        self._fill_sampling(start.sampling, effect.max_tokens, num_drawn)
        start.first_token_id = first_token
        start.awaits_first_token = effect.is_early
        start.prompt_compute_ms = round(prompt_compute_s * 1000)
        start.ticket.CopyFrom(ticket)
        self._fill(start, effect, record, replayed)
        return command

    def _fill(
        self,
        leg: Prefill | Start,
        effect: SendPrefill | SendStart,
        record: InstanceRecord,
        replayed: Sequence[int],
    ) -> None:
        """Set the fields that both commands have.

        `leg` is filled in place, inside its Command, because protobuf copies a message that is
        assigned to a field.
        """
        prompt, images = self._prompt, self._prompt.images
        leg.key = effect.key
        leg.request_id = self._identity.request_id
        leg.attempt = effect.attempt
        leg.prompt_token_ids = prompt.with_replayed(replayed)
        leg.block_hashes.extend(prompt.hashes(record, replayed))
        leg.remaining_ms = self._remaining_ms()
        leg.traceparent = self._identity.traceparent
        leg.cache_salt = prompt.root(record.model_fingerprint).hex()
        leg.model = self._model
        leg.priority = min(self._spec.tenant.priority, MAX_PRIORITY)
        if self._adapter is not None:
            leg.adapter.CopyFrom(self._adapter)
        if images:
            # A decode needs no image data, because it pulls the KV that the prefill computed.
            leg.images.extend(images_to_proto(images, with_data=isinstance(leg, Prefill)))

    def _num_prompt_logprobs(self, num_drawn: int) -> int | None:
        """None once the first token was drawn, as the prompt's log probabilities come with it."""
        return None if num_drawn else self._spec.sampling.num_prompt_logprobs

    def _fill_sampling(
        self,
        sampling: SamplingParams,
        max_tokens: int,
        num_drawn: int,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        asked = self._spec.sampling
        sampling.max_tokens = max_tokens
        sampling.temperature = asked.temperature
        sampling.top_p = asked.top_p
        sampling.stop_token_ids.extend(self._stop_token_ids)
        sampling.ignore_eos = asked.ignore_eos
        sampling.num_drawn = num_drawn
        if self._identity.seed is not None:
            sampling.seed = self._identity.seed
        if asked.num_logprobs is not None:
            sampling.num_logprobs = asked.num_logprobs
            sampling.logprob_token_ids.extend(asked.logprob_token_ids)
        if num_prompt_logprobs is not None:
            sampling.num_prompt_logprobs = num_prompt_logprobs
        if self._shaping is not None:
            sampling.shaping.CopyFrom(self._shaping)
        if self._constraint is not None:
            sampling.constraint.CopyFrom(self._constraint)

    def _remaining_ms(self) -> int:
        return max(1, int((self._identity.deadline - time.monotonic()) * 1000))


def images_to_proto(
    images: Sequence[PromptImage], *, with_data: bool
) -> Sequence[PromptImageMessage]:
    return [
        PromptImageMessage(
            position=image.position,
            num_tokens=image.num_tokens,
            digest=image.digest,
            data=image.data if with_data else b"",
            num_rows=image.num_rows,
        )
        for image in images
    ]


def adapter_to_proto(found: AdaptedModel | None) -> Adapter | None:
    if found is None:
        return None
    adapter = found.adapter
    return Adapter(name=adapter.name, digest=adapter.digest, path=adapter.path)


def shaping_to_proto(shaping: LogitShaping) -> LogitShapingMessage | None:
    if shaping is UNSHAPED:
        return None
    message = LogitShapingMessage(
        presence_penalty=shaping.presence_penalty,
        frequency_penalty=shaping.frequency_penalty,
        repetition_penalty=shaping.repetition_penalty,
        top_k=shaping.top_k,
        min_p=shaping.min_p,
        min_tokens=shaping.min_tokens,
        logit_bias=dict(shaping.logit_bias),
        allowed_token_ids=shaping.allowed_token_ids,
    )
    if (budget := shaping.thinking_token_budget) is not None:
        message.thinking_token_budget.num_tokens = budget.num_tokens
        message.thinking_token_budget.begin.extend(budget.marks.begin)
        message.thinking_token_budget.end.extend(budget.marks.end)
    for word in shaping.bad_words:
        message.bad_words.add(token_ids=word)
    return message


def constraint_to_proto(constraint: Constraint | None) -> ConstraintMessage | None:
    if constraint is None:
        return None
    return ConstraintMessage(grammar=constraint.grammar, begins_after=constraint.begins_after)
