"""The paths of the Responses API."""

from __future__ import annotations

from typing import Final

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.access.access_control import Permit
from pdmesh.services.gateway.http.calls import chat_spec
from pdmesh.services.gateway.http.exchange import HttpExchange
from pdmesh.services.gateway.http.responses.answers import (
    AnyResponseEvent,
    ForgottenResponse,
    ItemPage,
    ResponseAnswer,
)
from pdmesh.services.gateway.http.responses.format import (
    Json,
    Keep,
    ResponsesFormat,
    response_id_of,
)
from pdmesh.services.gateway.http.responses.kept import (
    forget_kept,
    input_items,
    items_of,
    load_kept,
    record_of,
)
from pdmesh.services.gateway.http.responses.schema import (
    InputItem,
    ResponsesRequest,
    parse_responses,
)
from pdmesh.services.gateway.http.responses.store import ResponseStore
from pdmesh.services.gateway.http.responses.translation import PREVIOUS, chat_of
from pdmesh.services.gateway.http.routes import (
    ASKING_ERRORS,
    TELLING_ERRORS,
    HttpRoute,
    Operation,
)
from pdmesh.services.gateway.http.schema import check_chat
from pdmesh.services.gateway.http.serving.answering import answer
from pdmesh.services.gateway.http.serving.intake import Intake
from pdmesh.services.gateway.request.bounds import MAX_MESSAGES
from pdmesh.services.gateway.request.frontend import Frontend

_PATH: Final = "/v1/responses"
_ONE: Final = f"{_PATH}/{{response}}"


class ResponsesPaths:
    def __init__(self, frontend: Frontend, intake: Intake, store: ResponseStore) -> None:
        self._frontend = frontend
        self._intake = intake
        self._store = store

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
                ),
            ),
            HttpRoute(
                "GET",
                _ONE,
                self._show,
                Operation("A kept response", ResponseAnswer, errors=TELLING_ERRORS),
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
                Operation("The items that a response answers", ItemPage, errors=TELLING_ERRORS),
            ),
        ]

    async def _create(self, exchange: HttpExchange) -> None:
        permit = await self._intake.admit(exchange)
        try:
            body = await self._intake.body(exchange)
            request = parse_responses(body, self._intake.ignored(exchange))
            if request.stream_options is not None and not request.stream:
                raise InvalidRequest("stream_options needs stream", field="stream_options")
            previous = await self._previous(request, permit)
            translated = chat_of(request, previous)
            with translated.naming():
                check_chat(translated.chat)
                spec = await chat_spec(translated.chat, self._frontend, permit.tenant)
                await answer(
                    exchange,
                    spec,
                    permit,
                    self._frontend,
                    ResponsesFormat(
                        request, exchange, self._keep(exchange, request, previous, permit)
                    ),
                    is_streamed=bool(request.stream),
                )
        finally:
            permit.leave()

    async def _previous(self, request: ResponsesRequest, permit: Permit) -> list[InputItem]:
        """Raises MeshError."""
        if request.previous_response_id is None:
            return []
        tenant = permit.tenant.name
        kept = await load_kept(self._store, tenant, request.previous_response_id, PREVIOUS)
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

        async def keep(response: Json) -> bool:
            response_id = response_id_of(exchange.request_id)
            record = record_of(items, response)
            return await self._store.keep(permit.tenant.name, response_id, record)

        return keep

    async def _show(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        kept = await load_kept(self._store, tenant.name, exchange.path_parameters["response"])
        await exchange.json(bytes(kept.response))

    async def _delete(self, exchange: HttpExchange) -> None:
        tenant = await self._intake.known(exchange)
        name = exchange.path_parameters["response"]
        await forget_kept(self._store, tenant.name, name)
        body = {"id": name, "object": "response", "deleted": True}
        await exchange.json(msgspec.json.encode(body))

    async def _list_input(self, exchange: HttpExchange) -> None:
        """All of them on one page."""
        tenant = await self._intake.known(exchange)
        kept = await load_kept(self._store, tenant.name, exchange.path_parameters["response"])
        items = kept.input[::-1]  # the newest first, as OpenAI's default
        ids = [msgspec.json.decode(items[at], type=InputItem).id for at in (0, -1)]
        body = {
            "object": "list", "data": items,
            "first_id": ids[0], "last_id": ids[1], "has_more": False,
        }  # fmt: skip
        await exchange.json(msgspec.json.encode(body))
