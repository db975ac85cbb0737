"""The paths of the Responses API."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from pdmesh.errors import InvalidRequest, Unavailable
from pdmesh.services.gateway.access.access_control import Permit, charged
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.http.responses.answers import (
    AnyResponseEvent,
    ForgottenResponse,
    InputTokenCount,
    ItemPage,
    ResponseAnswer,
)
from pdmesh.services.gateway.http.responses.background import (
    BackgroundCall,
    BackgroundResponses,
)
from pdmesh.services.gateway.http.responses.format import (
    Json,
    Keep,
    ResponsesFormat,
    ResponseWriter,
    response_id_of,
)
from pdmesh.services.gateway.http.responses.item_page import ITEM_QUERY, item_page
from pdmesh.services.gateway.http.responses.kept import (
    KeptResponse,
    abandoned,
    forget_kept,
    input_items,
    is_background,
    is_being_made,
    items_of,
    load_kept,
    record_of,
)
from pdmesh.services.gateway.http.responses.schema import (
    InputItem,
    ResponsesRequest,
    parse_responses,
    unsupported,
)
from pdmesh.services.gateway.http.responses.store import (
    KeepOutcome,
    ResponseStore,
    ResponseStoreFull,
)
from pdmesh.services.gateway.http.responses.translation import PREVIOUS, chat_of
from pdmesh.services.gateway.http.routes import (
    ASKING_ERRORS,
    TELLING_ERRORS,
    HttpRoute,
    Operation,
)
from pdmesh.services.gateway.http.serving.answering import answer, opened
from pdmesh.services.gateway.http.serving.intake import Intake
from pdmesh.services.gateway.openai.calls import chat_prompt, chat_spec
from pdmesh.services.gateway.openai.schema import check_chat
from pdmesh.services.gateway.request.bounds import MAX_MESSAGES
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import CallSpec

_PATH: Final = "/v1/responses"
_ONE: Final = f"{_PATH}/{{response}}"
_LOOK_EVERY_S: Final = 0.25
_NUM_LOOKS: Final = 12


class ResponsesPaths:
    def __init__(self, frontend: Frontend, intake: Intake, store: ResponseStore) -> None:
        self._frontend = frontend
        self._intake = intake
        self._store = store
        self.background = BackgroundResponses(frontend, store)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute(
                "POST",
                _PATH,
                self._create,
                Operation(
                    "Continue a conversation, in the format of responses",
                    ResponseAnswer,
                    takes=ResponsesRequest,
                    streams=AnyResponseEvent,
                    ends_in_done=False,
                    errors=ASKING_ERRORS,
                    makes={"response": "/id"},
                ),
            ),
            HttpRoute(
                "POST",
                f"{_PATH}/input_tokens",
                self._count_tokens,
                Operation(
                    "The number of tokens of the prompt of such a request",
                    InputTokenCount,
                    takes=ResponsesRequest,
                    errors=ASKING_ERRORS,
                ),
            ),
            HttpRoute(
                "GET",
                _ONE,
                self._show,
                Operation(
                    "A kept response",
                    ResponseAnswer,
                    errors=(400, *TELLING_ERRORS),
                    query={"stream": {"enum": ["false"]}},
                ),
            ),
            HttpRoute(
                "DELETE",
                _ONE,
                self._delete,
                Operation("Forget a kept response", ForgottenResponse, errors=TELLING_ERRORS),
            ),
            HttpRoute(
                "GET",
                f"{_ONE}/input_items",
                self._list_input,
                Operation(
                    "The items that a response answers",
                    ItemPage,
                    errors=(400, *TELLING_ERRORS),
                    query=ITEM_QUERY,
                ),
            ),
            HttpRoute(
                "POST",
                f"{_ONE}/cancel",
                self._cancel,
                Operation(
                    "Cancel a response in the background",
                    ResponseAnswer,
                    errors=(400, *TELLING_ERRORS),
                ),
            ),
        ]

    async def _create(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        is_in_background = False
        try:
            ignored = self._intake.ignored(exchange)
            request = parse_responses(await self._intake.body(exchange), ignored)
            if request.stream_options is not None and not request.stream:
                raise InvalidRequest("stream_options needs stream", field="stream_options")
            previous = await self._previous(request, permit)
            translated = chat_of(request, previous)
            with translated.naming():
                check_chat(translated.chat)
                with exchange.watched():
                    spec = await chat_spec(translated.chat, self._frontend, permit)
                keep = self._keep(exchange, request, previous, permit)
                written = ResponsesFormat(request, exchange, keep)
                request.input = ""  # frees base64 images, unless `keep` needs the input
                del previous, translated
                if request.background:
                    body = await self._begin(exchange, spec, permit, written)
                    is_in_background = True
                    await exchange.json(body)
                    return
                is_streamed = bool(request.stream)
                await answer(
                    exchange, spec, permit, self._frontend, written, is_streamed=is_streamed
                )
        finally:
            if not is_in_background:
                permit.leave()

    async def _count_tokens(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            ignored = self._intake.ignored(exchange)
            request = parse_responses(await self._intake.body(exchange), ignored)
            translated = chat_of(request, await self._previous(request, permit))
            chat = translated.chat
            with translated.naming():
                check_chat(chat)
                model = await self._frontend.served_model(
                    chat.model, permit.tenant, request.scenario
                )
                with exchange.watched():
                    tokens, _, _ = await chat_prompt(chat, model, self._frontend, permit)
            await charged(permit, lambda: permit.charge(len(tokens)))
            permit.settle(len(tokens))
        finally:
            permit.leave()
        await exchange.json(msgspec.json.encode(InputTokenCount(input_tokens=len(tokens))))

    async def _begin(
        self, exchange: HttpExchange, spec: CallSpec, permit: Permit, written: ResponsesFormat
    ) -> bytes:
        """Begin a response that no client waits for. Raises MeshError.

        The permit is given back when the response ends.
        """
        keep = written.keep
        if keep is None:
            raise InvalidRequest("this gateway keeps no responses", field="background")
        call = await opened(exchange, spec, permit, self._frontend, is_streamed=False)
        writer = ResponseWriter(call, written, tells=False)
        response = writer.begun()
        name = (permit.tenant.name, response["id"])
        try:
            await self._store.making([name])
            match await keep(response):
                case KeepOutcome.TOO_LARGE:
                    raise InvalidRequest("the request is too large to be kept", field="background")
                case KeepOutcome.FULL:
                    raise ResponseStoreFull("the Redis that keeps responses is full")
                case KeepOutcome.AWAY:
                    raise Unavailable("the store of responses does not take this one")
        except BaseException:
            self._frontend.close(call)
            raise
        body = msgspec.json.encode(response)
        self.background.start(response["id"], BackgroundCall(call, writer, permit, keep))
        return body

    async def _previous(self, request: ResponsesRequest, permit: Permit) -> list[InputItem]:
        """Raises MeshError."""
        if request.previous_response_id is None:
            return []
        tenant = permit.tenant.name
        kept = await self._found(tenant, request.previous_response_id, PREVIOUS)
        if is_being_made(kept):
            raise InvalidRequest("the response is still being made", field=PREVIOUS)
        if len(kept.input) + len(kept.output) > MAX_MESSAGES:
            raise InvalidRequest("the conversation has too many items", field=PREVIOUS)
        return items_of(kept)

    def _keep(
        self,
        exchange: HttpExchange,
        request: ResponsesRequest,
        previous: list[InputItem],
        permit: Permit,
    ) -> Keep | None:
        if request.store is False or not self._store.keeps:
            return None
        items = [*previous, *input_items(request.input)]

        async def keep(response: Json) -> KeepOutcome:
            response_id = response_id_of(exchange.request_id)
            record = record_of(items, response)
            return await self._store.keep(permit.tenant.name, response_id, record)

        return keep

    async def _show(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        if exchange.query.get("stream", "false") != "false":
            raise unsupported("stream")
        await exchange.json(await self._shown(tenant.name, exchange.path_parameters["response"]))

    async def _shown(self, tenant: str, response_id: str) -> bytes:
        """Raises ResponseNotFound, Unavailable."""
        return bytes((await self._found(tenant, response_id)).response)

    async def _found(self, tenant: str, response_id: str, field: str | None = None) -> KeptResponse:
        """A kept response. Raises ResponseNotFound, Unavailable.

        An unfinished response that no gateway is making any more is returned as failed. But a
        missing mark does not prove that no gateway is making the response. The response may have
        ended between two reads of the store. After an outage of Redis, the gateway that makes it
        may also reconnect later than this gateway. So the store is asked several times, for as long
        as a living gateway needs to set the mark.
        """
        for _ in range(_NUM_LOOKS):
            kept = await load_kept(self._store, tenant, response_id, field)
            is_over = not is_being_made(kept)
            if is_over or await self.background.is_made(tenant, response_id):
                return kept
            await asyncio.sleep(_LOOK_EVERY_S)
        return abandoned(kept)

    async def _cancel(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        response_id = exchange.path_parameters["response"]
        kept = await self._found(tenant.name, response_id)
        if not is_background(kept):
            raise InvalidRequest("only a response in the background can be cancelled")
        if is_being_made(kept):
            await self.background.cancel(tenant.name, response_id)
        await exchange.json(await self._shown(tenant.name, response_id))

    async def _delete(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        name = exchange.path_parameters["response"]
        if is_being_made(await self._found(tenant.name, name)):
            await self.background.cancel(tenant.name, name)
        await forget_kept(self._store, tenant.name, name)
        body = {"id": name, "object": "response", "deleted": True}
        await exchange.json(msgspec.json.encode(body))

    async def _list_input(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        kept = await load_kept(self._store, tenant.name, exchange.path_parameters["response"])
        await exchange.json(msgspec.json.encode(item_page(kept.input, exchange.query)))
