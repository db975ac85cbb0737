"""Turns the request core's effects into protobuf messages to the master and to instances."""

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
from pdmesh.v1.scheduler_service_pb2 import PlanQuery


@dataclass(slots=True)
class ChoiceIdentity:
    """The names under which instances and the master know one choice."""

    request_id: str
    index: int
    traceparent: str = ""
    seed: int | None = None
    max_tokens: int = 1
    deadline: float = 0.0  # monotonic


class LegCommands:
    """The messages of one choice. `emitted` is always all that the choice has emitted so far."""

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
        """Ask for a plan. `reference`: an instance that represents the model, if there is one."""
        spec, prompt = self._spec, self._prompt
        query = PlanQuery(
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
        if reference is not None and reference.kv_tail_step and not emitted:
            query.block_size = reference.block_size
            for partial in prompt.partial_blocks(reference, self._stop_token_ids):
                query.tails.add(
                    num_blocks=partial.num_blocks, num_tokens=partial.num_tokens, name=partial.name
                )
        return query

    def prefill(
        self,
        effect: SendPrefill,
        record: InstanceRecord,
        emitted: Sequence[int],
        kv_transfer: KvTransfer.ValueType,
        *,
        awaits_embeddings: bool = False,
    ) -> Command:
        prompt, replayed = self._prompt, emitted[: effect.num_replayed]
        return Command(
            prefill=Prefill(
                key=effect.key,
                request_id=self._identity.request_id,
                attempt=effect.attempt,
                prompt_token_ids=prompt.with_replayed(replayed),
                block_hashes=prompt.hashes(record, replayed),
                sampling=self._sampling(
                    effect.max_tokens, len(replayed), self._num_prompt_logprobs(len(replayed))
                ),
                remaining_ms=self._remaining_ms(),
                is_local=effect.to.is_local,
                traceparent=self._identity.traceparent,
                cache_salt=prompt.root(record.model_fingerprint).hex(),
                kv_transfer=kv_transfer,
                model=self._model,
                priority=min(self._spec.tenant.priority, MAX_PRIORITY),
                adapter=self._adapter,
                images=images_to_proto(prompt.images, with_data=True),
                awaits_embeddings=awaits_embeddings,
            )
        )

    def encode(self, key: int, attempt: int, record: InstanceRecord) -> Command:
        """Encode the prompt's images for `record`, the instance that computes the prompt."""
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

        Token 1 is the last replayed token, unless the decode must wait for it.
        """
        prompt, replayed = self._prompt, list(emitted[: effect.num_replayed])
        ticket = effect.ticket.wire
        assert isinstance(ticket, Ticket)
        num_drawn = len(replayed) + effect.is_early
        first_token = 0 if effect.is_early else replayed.pop()
        return Command(
            start=Start(
                key=effect.key,
                request_id=self._identity.request_id,
                attempt=effect.attempt,
                prompt_token_ids=prompt.with_replayed(replayed),
                block_hashes=prompt.hashes(record, replayed),
                first_token_id=first_token,
                awaits_first_token=effect.is_early,
                prompt_compute_ms=round(prompt_compute_s * 1000),
                ticket=ticket,
                sampling=self._sampling(effect.max_tokens, num_drawn),
                remaining_ms=self._remaining_ms(),
                traceparent=self._identity.traceparent,
                cache_salt=prompt.root(record.model_fingerprint).hex(),
                model=self._model,
                priority=min(self._spec.tenant.priority, MAX_PRIORITY),
                adapter=self._adapter,
                images=images_to_proto(prompt.images, with_data=False),
            )
        )

    def _num_prompt_logprobs(self, num_drawn: int) -> int | None:
        """None once a token was drawn: they came with the first one."""
        return None if num_drawn else self._spec.sampling.num_prompt_logprobs

    def _sampling(
        self, max_tokens: int, num_drawn: int, num_prompt_logprobs: int | None = None
    ) -> SamplingParams:
        asked = self._spec.sampling
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=self._identity.seed,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=asked.ignore_eos,
            num_logprobs=asked.num_logprobs,
            logprob_token_ids=asked.logprob_token_ids,
            num_drawn=num_drawn,
            shaping=self._shaping,
            num_prompt_logprobs=num_prompt_logprobs,
            constraint=self._constraint,
        )

    def _remaining_ms(self) -> int:
        return max(1, int((self._identity.deadline - time.monotonic()) * 1000))


def images_to_proto(
    images: Sequence[PromptImage], *, with_data: bool
) -> Sequence[PromptImageMessage]:
    """A decode gets no data: it pulls the KV that a prefill computed of them."""
    return [
        PromptImageMessage(
            position=image.position,
            num_tokens=image.num_tokens,
            digest=image.digest,
            data=image.data if with_data else b"",
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
