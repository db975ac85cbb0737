"""Admits a request of any API: checks the API key and the limits, and reads the body."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.tenancy.limits import Tenant
from pdmesh.services.gateway.access.access_control import AccessControl, Permit
from pdmesh.services.gateway.http.exchange import BodyRoom, HttpExchange
from pdmesh.services.gateway.request.frontend import Frontend


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Bounds on the bytes that clients send, and on the time that a write to a client may take.

    With `is_strict`, unknown fields are refused.
    """

    max_body_bytes: int
    max_incoming_bytes: int
    write_timeout_s: float
    is_strict: bool = False


class Intake:
    def __init__(self, frontend: Frontend, access: AccessControl, bounds: HttpBounds) -> None:
        self.body_room = BodyRoom(bounds.max_incoming_bytes)
        self._frontend = frontend
        self._access = access
        self._max_body_bytes = bounds.max_body_bytes
        self.is_strict = bounds.is_strict

    async def admit(self, exchange: HttpExchange) -> Permit:
        """Admit a call before its body is read. Raises MeshError."""
        self._frontend.check_open()
        return await self._access.enter(exchange.authorization)

    async def known(self, exchange: HttpExchange) -> Tenant:
        """The tenant of a request that uses no tokens. Raises MeshError.

        The request counts toward the tenant's limit of requests.
        """
        permit = await self._access.enter(exchange.authorization)
        permit.leave()
        return permit.tenant

    async def body(self, exchange: HttpExchange) -> bytes:
        """See `HttpExchange.body`."""
        return await exchange.body(self._max_body_bytes, self.body_room)

    def ignored(self, exchange: HttpExchange) -> list[str] | None:
        """The list to which a parser adds the names of unknown fields.

        None means that the parser refuses unknown fields.
        """
        return None if self.is_strict else exchange.ignored_fields
