"""Finds out who a caller of the admin API is, and which role the caller has.

A caller sends the admin token, an operator's API key, or a token of the OpenID provider. If a
caller sends none of these, its certificate and its address decide (`core.access.operator_roles`).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from pdmesh import api_keys
from pdmesh.core.access.claims import ClaimNames, role_of, who_of
from pdmesh.core.access.exposure import is_loopback_number
from pdmesh.core.access.operator_roles import AdminRole, role_without_token
from pdmesh.errors import NotAllowed
from pdmesh.followed_keys import FollowedKeys, OnKeysChanged
from pdmesh.net.grpc.peers import caller_of
from pdmesh.net.oidc.verifier import TokenVerifier
from pdmesh.net.tasks import together

_SCHEME: Final = "bearer "
_WRONG: Final = (
    "the admin token is missing or wrong: `authorization: Bearer TOKEN`; pdmesh takes it from "
    "PDMESH_ADMIN_TOKEN, PDMESH_ADMIN_TOKEN_FILE or PDMESH_TOKEN"
)
_NOT_HERE: Final = "without an admin token only calls from this machine are served"
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class AdminCaller:
    """The caller of an admin method, or the cause of a change.

    `shown_by` tells how the caller was identified: admin_token, api_key, token, certificate, or
    local if only the address was used. For a change of the key file, `shown_by` is key_file. `role`
    is None if the caller has no role. `address` is in gRPC's notation.
    """

    who: str
    shown_by: str
    role: AdminRole | None
    address: str = ""

    @property
    def name(self) -> str:
        """The caller's own name. Empty if only the shared admin token or the address is known."""
        return "" if self.shown_by in ("admin_token", "local") else self.who


@dataclass(frozen=True, slots=True)
class OperatorSources:
    """The credentials that are accepted beside the admin token. None means not accepted."""

    keys: FollowedKeys | None = None
    tokens: TokenVerifier | None = None
    names: ClaimNames = field(default_factory=ClaimNames)


class AdminAccess:
    """Identifies callers.

    `token` is the admin token, or empty if none is set. `page_url` returns the URL of the
    operators' page.
    """

    def __init__(
        self,
        token: str,
        page_url: Callable[[], str] = str,
        sources: OperatorSources | None = None,
    ) -> None:
        self._token, self.page_url = token.encode(), page_url
        self._sources = sources or OperatorSources()

    @property
    def has_token(self) -> bool:
        return bool(self._token)

    async def run(self, on_keys_changed: OnKeysChanged) -> None:
        """Follow the key file and the provider's keys. Runs until cancelled."""
        works = []
        if self._sources.keys is not None:
            works.append(self._sources.keys.run(on_keys_changed))
        if self._sources.tokens is not None:
            works.append(self._sources.tokens.run())
        await (together(*works) if works else asyncio.Event().wait())

    async def caller(self, context: Context) -> AdminCaller:
        """Identify the caller. Raises NotAllowed, InvalidToken or Unavailable."""
        metadata: Any = context.invocation_metadata() or ()  # pairs; the type stubs are wrong
        peer = context.peer()
        bearer = _bearer(metadata)
        if bearer and (shown := await self._of_bearer(bearer, peer)) is not None:
            return shown
        certificate = caller_of(context)
        found = role_without_token(
            has_admin_token=self.has_token,
            certificate_role=certificate.role if certificate is not None else None,
            is_local=is_local(peer),
        )
        if found is None:
            raise NotAllowed(_WRONG if self._token else _NOT_HERE)
        who = str(certificate) if certificate is not None else found.by
        return AdminCaller(who, found.by, found.role, peer)

    async def _of_bearer(self, bearer: str, peer: str) -> AdminCaller | None:
        """The caller who sends this bearer token.

        None if the token is not the admin token and no other credentials are accepted. Raises
        NotAllowed, InvalidToken, Unavailable.
        """
        if self._token and hmac.compare_digest(bearer.encode(), self._token):
            return AdminCaller("admin-token", "admin_token", AdminRole.ADMIN, peer)
        sources = self._sources
        if sources.keys is not None and api_keys.is_key(bearer):
            holder = sources.keys.keyring.holder(bearer, time.time())
            if holder is None or holder.tenant.is_disabled:
                raise NotAllowed("this API key is not valid")
            who = f"{holder.tenant.name}/{holder.key_id}"
            return AdminCaller(who, "api_key", holder.role, peer)
        if sources.tokens is not None and bearer.count(".") == 2:
            claims = await sources.tokens.claims(bearer)
            return AdminCaller(who_of(claims), "token", role_of(claims, sources.names), peer)
        if sources.tokens is not None or sources.keys is not None:
            raise NotAllowed(_WRONG)
        return None


def is_local(peer: str) -> bool:
    """Whether a peer is on this machine.

    In gRPC's notation, an address is `ipv4:127.0.0.1:4711`, `ipv6:[::1]:4711` (percent-encoded or
    not), or `unix:...`.
    """
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    return is_loopback_number(rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0])


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip()
    return ""
