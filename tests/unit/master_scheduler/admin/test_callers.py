"""The identity and the role of a caller of the admin API."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.claims import ClaimNames
from pdmesh.core.access.key_refresh import KeyRefresh
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.errors import InvalidToken, NotAllowed, Unavailable
from pdmesh.followed_keys import FollowedKeys
from pdmesh.net.oidc.keys import ALGORITHMS
from pdmesh.net.oidc.verifier import TokenRules, TokenVerifier
from pdmesh.net.tasks import end
from pdmesh.services.master_scheduler.admin import callers as module
from pdmesh.services.master_scheduler.admin.callers import (
    AdminAccess,
    AdminCaller,
    OperatorSources,
    is_local,
)

TOKEN = "0123456789abcdef0123"
HERE, ELSEWHERE = "ipv4:127.0.0.1:4711", "ipv4:10.0.0.7:4711"
ISSUER, AUDIENCE = "https://id.example.org", "pdmesh"
KEY = ec.generate_private_key(ec.SECP256R1())


@dataclass
class Call:
    """Stands in for a gRPC call. It has the parts that the master reads."""

    address: str
    authorization: str = ""
    certificate: ProcessIdentity | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", self.authorization),) if self.authorization else ()

    def peer(self) -> str:
        return self.address


async def caller(access: AdminAccess, call: Any) -> AdminCaller:
    return await access.caller(call)


def bearer(token: str, address: str = ELSEWHERE) -> Call:
    return Call(address, f"Bearer {token}")


def verifier() -> TokenVerifier:
    public = jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
    rules = TokenRules(ISSUER, AUDIENCE, ALGORITHMS, 0.0)
    jwks = {"keys": [{**public, "kid": "k"}]}
    return TokenVerifier(rules, lambda: json.loads(json.dumps(jwks)), KeyRefresh(300.0, 10.0))


async def _ignore(*_: KeyFile) -> None: ...


def token(**claims: Any) -> str:
    whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "ann", **claims}
    return jwt.encode(whole, KEY, "ES256", {"kid": "k"})


async def test_without_a_token_only_this_machine_is_served() -> None:
    access = AdminAccess("")
    assert await caller(access, Call(HERE)) == AdminCaller("local", "local", AdminRole.ADMIN, HERE)
    with pytest.raises(NotAllowed):
        await caller(access, Call(ELSEWHERE))
    with pytest.raises(NotAllowed):
        await caller(access, bearer(TOKEN))


async def test_with_a_token_every_caller_must_know_it() -> None:
    access = AdminAccess(TOKEN)
    found = await caller(access, bearer(TOKEN))
    assert (found.who, found.role) == ("admin-token", AdminRole.ADMIN)
    for value in (f"Bearer {TOKEN}x", TOKEN, "Bearer ", "", "Bearer pdm_x_y", "Bearer a.b.c"):
        with pytest.raises(NotAllowed):
            await caller(access, Call(HERE, value))


async def test_an_api_key_has_the_role_that_it_was_made_with(tmp_path: Path) -> None:
    file = KeyFile()
    keys = {role: api_keys.issue(file, "ops", role=role) for role in (None, *AdminRole)}
    expired = api_keys.issue(file, "ops", expires_at=1, role=AdminRole.ADMIN)
    api_keys.save(tmp_path / "keys.json", file)
    sources = OperatorSources(FollowedKeys(tmp_path / "keys.json"))
    for admin_token in ("", TOKEN):
        access = AdminAccess(admin_token, sources=sources)
        for role, key in keys.items():
            found = await caller(access, bearer(key))
            who = f"ops/{key.split('_')[1]}"
            assert found == AdminCaller(who, "api_key", role, ELSEWHERE)
        for wrong in (keys[AdminRole.ADMIN] + "x", expired, "pdm_", "a.b.c", "x"):
            with pytest.raises(NotAllowed):
                await caller(access, bearer(wrong, HERE))
    file.tenants["ops"].is_disabled = True
    api_keys.save(tmp_path / "keys.json", file)
    access = AdminAccess("", sources=OperatorSources(FollowedKeys(tmp_path / "keys.json")))
    with pytest.raises(NotAllowed):
        await caller(access, bearer(keys[AdminRole.ADMIN]))


async def test_a_token_has_the_role_of_its_claim() -> None:
    names = ClaimNames(role="roles")
    access = AdminAccess("", sources=OperatorSources(None, verifier(), names))
    with pytest.raises(Unavailable):
        await caller(access, bearer(token()))
    running = asyncio.create_task(access.run(_ignore))
    try:
        for roles, role in (
            (["pdmesh-admin"], AdminRole.ADMIN), ("pdmesh-viewer", AdminRole.VIEWER), ([], None),
        ):  # fmt: skip
            found = await caller(access, bearer(token(roles=roles, email="ann@example.org")))
            assert found == AdminCaller("ann (ann@example.org)", "token", role, ELSEWHERE)
        for wrong, reason in (
            (token(exp=1, roles=["pdmesh-admin"]), "TOKEN_EXPIRED"),
            (token(aud="others", roles=["pdmesh-admin"]), "WRONG_AUDIENCE"),
            (token(iss="https://evil.example.org"), "WRONG_ISSUER"),
            ("a.b.c", "INVALID_TOKEN"),
        ):
            with pytest.raises(InvalidToken) as refused:
                await caller(access, bearer(wrong, HERE))
            assert refused.value.reason == reason
        with pytest.raises(NotAllowed):
            await caller(access, bearer("nonsense", HERE))
    finally:
        await end([running])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("viewer", AdminRole.VIEWER), ("operator", AdminRole.OPERATOR), ("admin", AdminRole.ADMIN),
        ("gateway", None),
    ],
)  # fmt: skip
async def test_a_certificate_has_the_role_in_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, role: AdminRole | None
) -> None:
    monkeypatch.setattr(module, "caller_of", lambda call: call.certificate)
    shown = Call(ELSEWHERE, certificate=ProcessIdentity(name, "ann"))
    found = await caller(AdminAccess(""), shown)
    assert found == AdminCaller(f"{name}/ann", "certificate", role, ELSEWHERE)
    with pytest.raises(NotAllowed):  # if a token is set, a certificate alone is not enough
        await caller(AdminAccess(TOKEN), shown)
    shown.authorization = f"Bearer {TOKEN}"
    assert (await caller(AdminAccess(TOKEN), shown)).role is AdminRole.ADMIN


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:1", True), ("ipv4:127.8.0.9:1", True), ("ipv6:[::1]:1", True),
        ("ipv6:%5B::1%5D:1", True),
        ("unix:/run/x", True), ("unix:", True), ("ipv4:192.168.0.1:1", False),
        ("ipv6:[fe80::1]:1", False),
        ("ipv4:1270.0.1:1", False), ("dns:localhost:1", False), ("", False),
    ],
)  # fmt: skip
def test_addresses_of_this_machine_are_recognized(peer: str, expected: bool) -> None:
    assert is_local(peer) is expected
