"""The paths of the Messages API."""

from __future__ import annotations

from typing import Final

import msgspec

from pdmesh.core.tenancy.limits import Tenant
from pdmesh.services.gateway.access.access_control import charged
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.http.messages.answers import (
    MessageAnswer,
    MessageEvent,
    MessagesErrorAnswer,
    TokenCount,
)
from pdmesh.services.gateway.http.messages.format import MessagesFormat
from pdmesh.services.gateway.http.messages.schema import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_tokens,
    parse_messages,
)
from pdmesh.services.gateway.http.messages.translation import chat_of, has_later_system
from pdmesh.services.gateway.http.routes import ASKING_ERRORS, HttpRoute, Operation
from pdmesh.services.gateway.http.serving.answering import answer
from pdmesh.services.gateway.http.serving.intake import Intake
from pdmesh.services.gateway.openai.calls import chat_prompt, chat_spec
from pdmesh.services.gateway.openai.schema import check_chat
from pdmesh.services.gateway.openai.translated import TranslatedChat
from pdmesh.services.gateway.request.frontend import Frontend

PREFIX: Final = "/v1/messages"


class MessagesPaths:
    def __init__(self, frontend: Frontend, intake: Intake) -> None:
        self._frontend = frontend
        self._intake = intake

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute(
                "POST",
                PREFIX,
                self._create,
                Operation(
                    "Continue a conversation, in Anthropic's format",
                    MessageAnswer,
                    takes=MessagesRequest,
                    streams=MessageEvent,
                    ends_in_done=False,
                    errors=ASKING_ERRORS,
                    fails=MessagesErrorAnswer,
                ),
            ),
            HttpRoute(
                "POST",
                f"{PREFIX}/count_tokens",
                self._count_tokens,
                Operation(
                    "The number of tokens of such a prompt",
                    TokenCount,
                    takes=CountTokensRequest,
                    errors=ASKING_ERRORS,
                    fails=MessagesErrorAnswer,
                ),
            ),
        ]

    async def _create(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            ignored = self._intake.ignored(exchange)
            request = parse_messages(await self._intake.body(exchange), ignored)
            translated = await self._chat_of(request, permit.tenant)
            with translated.naming():
                check_chat(translated.chat)
                with exchange.watched():
                    spec = await chat_spec(translated.chat, self._frontend, permit)
                written, is_streamed = MessagesFormat(), bool(request.stream)
                del request, translated  # base64 images in them take much memory
                await answer(
                    exchange, spec, permit, self._frontend, written, is_streamed=is_streamed
                )
        finally:
            permit.leave()

    async def _chat_of(self, request: CountTokensRequest, tenant: Tenant) -> TranslatedChat:
        """Raises MeshError."""
        if not has_later_system(request):
            return chat_of(request)
        scenario = request.scenario if isinstance(request, MessagesRequest) else ""
        model = await self._frontend.served_model(request.model, tenant, scenario)
        return chat_of(request, merges_system=not model.tokenizer.takes_later_system)

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request = parse_count_tokens(body, self._intake.ignored(exchange))
            translated = await self._chat_of(request, permit.tenant)
            with translated.naming():
                check_chat(translated.chat)
                model = await self._frontend.served_model(translated.chat.model, permit.tenant)
                with exchange.watched():
                    tokens, _, _ = await chat_prompt(translated.chat, model, self._frontend, permit)
            await charged(permit, lambda: permit.charge(len(tokens)))
            permit.settle(len(tokens))
        finally:
            permit.leave()
        await exchange.json(msgspec.json.encode({"input_tokens": len(tokens)}))
