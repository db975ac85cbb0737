"""Places a request for the picker: reads its body, and asks the master for a plan.

A plan names the instances that a request may go to. The picker uses the same code as a gateway up
to the plan. So most requests that the gateway would refuse are refused with the same error. A
request that has images or continues a kept response goes to a gateway without a plan.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pdmesh.core.placement.chat_key import key_of, key_of_beginning, num_in_beginning
from pdmesh.core.request.events import AskPlan, Candidate, Event, PlanFailed, PlanReceived
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import NoInstance, Overloaded
from pdmesh.services.gateway.http.messages.schema import parse_messages
from pdmesh.services.gateway.http.messages.translation import chat_of as chat_of_messages
from pdmesh.services.gateway.http.messages.translation import has_later_system
from pdmesh.services.gateway.http.responses.schema import parse_responses
from pdmesh.services.gateway.http.responses.translation import chat_of as chat_of_responses
from pdmesh.services.gateway.openai.calls import (
    chat_tokens,
    completion_lengths,
    completion_prompts,
    conversation_of,
    truncated,
)
from pdmesh.services.gateway.openai.chat_images import has_images
from pdmesh.services.gateway.openai.chat_messages import ChatMessage, without_billing_line
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    chat_id_of,
    check_chat,
    parse_chat,
    parse_completion,
)
from pdmesh.services.gateway.openai.translated import TranslatedChat
from pdmesh.services.gateway.request.frontend import Frontend, handed_for, new_request_id
from pdmesh.services.gateway.request.leg_commands import ChoiceIdentity, LegCommands
from pdmesh.services.gateway.request.spec import (
    CallSpec,
    PreparedCall,
    SamplingSpec,
    ServedModel,
)
from pdmesh.v1.scheduler_service_pb2 import Candidate as CandidateProto
from pdmesh.v1.scheduler_service_pb2 import HandedPlan, PlanResult

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_PATHS: Final = frozenset({CHAT, COMPLETION, MESSAGES, RESPONSES})


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """`key` is equal for all turns of a chat. `region` is the region of the planned instances.

    `plan` is for the gateway that gets the request. If `plan` is None, that gateway asks the
    master.
    """

    key: bytes = b""
    region: str = ""
    plan: HandedPlan | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """The call that the body asks for, and its chat's first messages, which later turns repeat."""

    spec: CallSpec
    beginning: bytes


def is_planned(method: str, path: str) -> bool:
    return method == "POST" and path in _PATHS


class Placing:
    """With `is_strict`, unknown fields of a body are refused."""

    def __init__(self, frontend: Frontend, *, is_strict: bool) -> None:
        self._frontend, self._shared = frontend, frontend.shared
        self._is_strict = is_strict

    async def place(self, path: str, body: bytes, tenant: Tenant) -> PlacedRequest:
        """Raises MeshError."""
        if path == COMPLETION:
            return await self._placed(await self._completion(body, tenant))
        translated = await self._chat(path, body, tenant)
        if translated is None:
            return PlacedRequest()
        with translated.naming():
            check_chat(translated.chat)
            if has_images(translated.chat.messages):
                return PlacedRequest(self._key(tenant, _beginning(translated.chat.messages)))
            return await self._placed(await self._read_chat(translated.chat, tenant))

    # --- reading ---------------------------------------------------------------------------------

    def _ignored(self) -> list[str] | None:
        return None if self._is_strict else []

    async def _chat(self, path: str, body: bytes, tenant: Tenant) -> TranslatedChat | None:
        """The chat, or None if the request continues a kept response. Raises MeshError."""
        if path == CHAT:
            return TranslatedChat(parse_chat(body, self._ignored()))
        if path == RESPONSES:
            response = parse_responses(body, self._ignored())
            return None if response.previous_response_id else chat_of_responses(response)
        message = parse_messages(body, self._ignored())
        if not has_later_system(message):
            return chat_of_messages(message)
        model = await self._frontend.served_model(message.model, tenant, message.scenario)
        return chat_of_messages(message, merges_system=not model.tokenizer.takes_later_system)

    async def _read_chat(self, chat: ChatCompletionRequest, tenant: Tenant) -> _Read:
        model = await self._frontend.served_model(chat.model, tenant, chat.scenario)
        tokens = await chat_tokens(
            conversation_of(chat), model, tenant, add_special_tokens=bool(chat.add_special_tokens)
        )
        prompt = truncated(tokens, chat, model.context_length)
        lengths = SamplingSpec(
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            default_max_tokens=model.tokenizer.defaults.max_tokens,
        )
        spec = msgspec.structs.replace(
            _spec(chat, model, (prompt,), lengths, tenant),
            operation="chat",
            field_of_prompt="messages",
            field_of_max_tokens="max_completion_tokens"
            if chat.max_completion_tokens
            else "max_tokens",
        )
        return _Read(spec, _beginning(chat.messages))

    async def _completion(self, body: bytes, tenant: Tenant) -> _Read:
        request = parse_completion(body, self._ignored())
        model = await self._frontend.served_model(request.model, tenant, request.scenario)
        _, prompts = await completion_prompts(request, model)
        max_tokens, default = completion_lengths(request, model)
        lengths = SamplingSpec(max_tokens=max_tokens, default_max_tokens=default)
        return _Read(_spec(request, model, prompts, lengths, tenant), b"")

    # --- planning --------------------------------------------------------------------------------

    async def _placed(self, read: _Read) -> PlacedRequest:
        prepared = await self._frontend.prepare(read.spec)
        key = self._key_of(prepared, read.beginning)
        try:
            return await self._planned(prepared, key)
        except (Overloaded, NoInstance):
            if self._shared.slos.default_text(prepared.spec.scenario) is None:
                raise
            return PlacedRequest(key)  # the gateway answers with a default text, not the error

    async def _planned(self, prepared: PreparedCall, key: bytes) -> PlacedRequest:
        spec, prompt = prepared.spec, prepared.prompts[0]
        if (refused := self._shared.refusal(spec, len(prompt.tokens))) is not None:
            raise refused
        request_id = new_request_id()
        identity = ChoiceIdentity(request_id, 0, max_tokens=prepared.max_tokens[0])
        commands = LegCommands(spec, prompt, identity, ())
        reference = self._shared.fleet.reference(spec.base_model)
        query = commands.plan_query(AskPlan(1, 0, ()), reference, (), identity.max_tokens)
        asker = _Asker()
        self._shared.planner.ask(asker, 1, query, spec.tokenizer.vocabulary)
        received = await asker.received()
        region = self._region(received)
        if not received.is_by_master:
            # Without a master, a gateway ranks instances by the number of its own requests on each.
            # So the picked gateway makes the plan itself.
            return PlacedRequest(key, region)
        handed = handed_for(prepared)
        handed.result.CopyFrom(self._result(request_id, received))
        return PlacedRequest(key, region, handed)

    def _result(self, request_id: str, received: PlanReceived) -> PlanResult:
        most = self._shared.limits.max_candidates
        return PlanResult(
            request_id=request_id,
            prefills=_protos(received.prefills[:most]),
            decodes=_protos(received.decodes[:most]),
            prompt_compute_ms=round(received.prompt_compute_s * 1000),
            first_token_ms=round(received.first_token_s * 1000),
        )

    def _region(self, received: PlanReceived) -> str:
        """The region of the instance that sends the answer's tokens."""
        first = (received.decodes or received.prefills)[0]
        return self._shared.fleet.region_of(first.instance_id)

    # --- which requests belong together ----------------------------------------------------------

    def _key_of(self, prepared: PreparedCall, beginning: bytes) -> bytes:
        spec, prompt = prepared.spec, prepared.prompts[0]

        def by_beginning() -> bytes:
            return self._key(spec.tenant, beginning) if beginning else b""

        def blocks() -> Sequence[bytes]:
            reference = self._shared.fleet.reference(spec.base_model)
            return prompt.hashes(reference) if reference is not None else ()

        return key_of(prompt.chat_key(spec.chat_id), by_beginning, blocks)

    def _key(self, tenant: Tenant, beginning: bytes) -> bytes:
        return key_of_beginning(self._shared.hash_secret, tenant.name, beginning)


class _Asker:
    """Waits for the answer of the planner."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def on_event(self, event: Event) -> None:
        if not self._answer.done():  # the picker may have stopped waiting
            self._answer.set_result(event)

    async def received(self) -> PlanReceived:
        """Raises MeshError."""
        event = await self._answer
        if isinstance(event, PlanFailed):
            raise event.error
        assert isinstance(event, PlanReceived)
        if not (event.prefills or event.decodes):
            raise NoInstance("no prefill and decode can serve this request")
        return event


def _spec(
    request: ChatCompletionRequest | CompletionRequest,
    model: ServedModel,
    prompts: Sequence[array[int]],
    sampling: SamplingSpec,
    tenant: Tenant,
) -> CallSpec:
    return CallSpec(
        operation="text_completion",
        model=model.name,
        prompts=tuple(prompts),
        sampling=sampling,
        tokenizer=model.tokenizer,
        context_length=model.context_length,
        n=request.n or 1,
        scenario=request.scenario,
        chat_id=chat_id_of(request),
        cache_salt=request.cache_salt,
        tenant=tenant,
        adapter=model.adapter,
    )


def _beginning(messages: Sequence[ChatMessage]) -> bytes:
    first = messages[: num_in_beginning([message.role for message in messages])]
    return msgspec.json.encode([without_billing_line(message) for message in first])


def _protos(candidates: Sequence[Candidate]) -> list[CandidateProto]:
    return [
        CandidateProto(
            instance_id=c.instance_id,
            incarnation=c.incarnation,
            num_matched_tokens=c.num_matched_tokens,
            is_local=c.is_local,
        )
        for c in candidates
    ]
