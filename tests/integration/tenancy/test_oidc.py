"""Sends tokens of a real OpenID provider to a gateway's HTTP and gRPC ports. The provider runs in a
process of its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.access.access_control import KeyedAccess
from pdmesh.services.gateway.access.client_tokens import client_tokens
from pdmesh.services.gateway.settings import Settings
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.sites.oidc_provider import AUDIENCE, OidcProvider, oidc_provider
from tests.support.waiting import until

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
ACME: dict[str, Any] = {"tenant": "acme", "limits": {"max_concurrent": 3, "priority": 0}}


@dataclass
class Door:
    """A gateway that accepts tokens of the provider and keys of its key file."""

    mesh: GatewayMesh
    client: httpx.AsyncClient
    access: KeyedAccess
    key: str

    async def ask(self, token: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return await self.client.post("/v1/completions", json=BODY, headers=headers)

    async def refusal(self, token: str) -> tuple[int, str, str]:
        """The status, reason and message of the refusal over HTTP. Checks that gRPC gives the same
        status and reason.
        """
        answer = await self.ask(token)
        error = answer.json()["error"]
        if answer.status_code == 401:
            challenge = answer.headers["www-authenticate"]
            assert challenge.startswith('Bearer error="invalid_token", error_description="')
        told = await self.over_grpc(token)
        assert told is not None
        assert (told.http_status, told.reason.lower()) == (answer.status_code, error["code"])
        return answer.status_code, error["code"], error["message"]

    async def over_grpc(self, token: str) -> Any:
        params = pb.GenerationParams(max_tokens=4)
        request = pb.GenerateRequest(model="tiny", text="abc", params=params)
        async with rpc.channel(f"127.0.0.1:{self.mesh.gateway.grpc.port}") as channel:
            metadata = (("authorization", f"Bearer {token}"),)
            try:
                await InferenceServiceStub(channel).Generate(request, metadata=metadata)
            except grpc.aio.AioRpcError as exc:
                return rpc.from_rpc_error(exc)
        return None


@asynccontextmanager
async def door(folder: Path, provider: OidcProvider, **settings: Any) -> AsyncIterator[Door]:
    oidc = {
        "oidc_issuer": provider.issuer, "oidc_audience": AUDIENCE, "oidc_limits_claim": "limits",
        "oidc_leeway_s": 5.0, "oidc_early_refresh_s": 1.0, **settings,
    }  # fmt: skip
    file = KeyFile(tenants={"keyed": TenantEntry(max_concurrent=9)})
    key = api_keys.issue(file, "keyed")
    api_keys.save(folder / "keys.json", file)
    access = KeyedAccess(folder / "keys.json", client_tokens(Settings(**oidc)))
    async with (
        gateway_mesh(folder, access=access) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        yield Door(mesh, client, access, key)


async def test_a_token_is_its_tenant_with_the_limits_of_its_claims(tmp_path: Path) -> None:
    users: dict[str, Any] = {
        "ann": ACME,
        "bob": {"tenant": "keyed", "limits": {"max_concurrent": 1}},
    }
    with oidc_provider(tmp_path, **users) as provider:
        async with door(tmp_path, provider) as at:
            tokens = {user: await asyncio.to_thread(provider.token, user) for user in users}
            for token in (*tokens.values(), at.key):
                assert (await at.ask(token)).status_code == 200
                assert await at.over_grpc(token) is None
            tenants = [
                (await at.access.enter(f"Bearer {t}")).tenant for t in (*tokens.values(), at.key)
            ]
            found = [(t.name, t.limits.max_concurrent, t.priority) for t in tenants]
            assert found == [("acme", 3, 0), ("keyed", 9, 1), ("keyed", 9, 1)], "the file wins"


async def test_a_limit_of_the_claims_holds(tmp_path: Path) -> None:
    once = {"tenant": "acme", "limits": {"requests_per_s": 0.001}}
    with oidc_provider(tmp_path, ann=once) as provider:
        async with door(tmp_path, provider) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            assert (await at.ask(token)).status_code == 200
            refused = await at.ask(token)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_token_for_another_service_or_without_a_tenant_is_refused(tmp_path: Path) -> None:
    with oidc_provider(tmp_path, ann=ACME, eve={}) as provider:
        async with door(tmp_path, provider) as at:
            status, code, message = await at.refusal(
                await asyncio.to_thread(provider.token, "ann", "another")
            )
            assert (status, code) == (401, "wrong_audience")
            assert "aud does not contain pdmesh" in message
            status, code, message = await at.refusal(await asyncio.to_thread(provider.token, "eve"))
            assert (status, code) == (403, "permission_denied")
            assert message.startswith("claim tenant: ")


@pytest.mark.parametrize(
    ("skew_s", "code"), [(4, ""), (-7, ""), (60, "token_not_yet"), (-60, "token_expired")]
)
async def test_a_providers_clock_may_be_off_by_the_leeway(
    tmp_path: Path, skew_s: int, code: str
) -> None:
    """The provider's tokens are valid for ten seconds."""
    with oidc_provider(tmp_path, 10, skew_s, ann=ACME) as provider:
        async with door(tmp_path, provider) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            if not code:
                assert (await at.ask(token)).status_code == 200
            else:
                assert (await at.refusal(token))[:2] == (401, code)


async def test_a_token_expires_although_it_was_accepted_before(tmp_path: Path) -> None:
    with oidc_provider(tmp_path, 2, ann=ACME) as provider:
        async with door(tmp_path, provider, oidc_leeway_s=0.0) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            assert (await at.ask(token)).status_code == 200

            async def is_over() -> bool:
                return (await at.ask(token)).status_code == 401

            await until(is_over)
            assert (await at.refusal(token))[:2] == (401, "token_expired")


@pytest.mark.parametrize("names_key", [True, False])
async def test_a_new_key_is_fetched_when_a_token_names_it_and_the_old_one_ends(
    tmp_path: Path, names_key: bool
) -> None:
    """The provider's tokens may name their key or not. The next regular fetch of keys is an hour
    away.
    """
    with oidc_provider(tmp_path, ann=ACME) as provider:
        provider.stop()
        provider.start(names_key=names_key)
        async with door(tmp_path, provider, oidc_refresh_s=3600.0) as at:
            old = await asyncio.to_thread(provider.token, "ann")
            assert (await at.ask(old)).status_code == 200
            provider.stop()
            await asyncio.to_thread(provider.start, names_key=names_key)
            new = await asyncio.to_thread(provider.token, "ann")
            assert (await at.ask(old)).status_code == 200, "until the keys are fetched again"

            async def is_known() -> bool:
                return (await at.ask(new)).status_code == 200

            # The gateway fetches at once, unless its last fetch was less than a second ago.
            await until(is_known)
            code = "unknown_key" if names_key else "wrong_signature"
            assert (await at.refusal(old))[:2] == (401, code)


async def test_while_the_provider_is_away_or_silent_its_last_keys_go_on(tmp_path: Path) -> None:
    with oidc_provider(tmp_path, ann=ACME) as provider:
        async with door(tmp_path, provider, oidc_refresh_s=0.2) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            unknown = _signed({"alg": "RS256", "kid": "other"}, _claims(provider))
            assert (await at.ask(token)).status_code == 200
            provider.freeze()
            asking = [asyncio.create_task(at.ask(unknown)) for _ in range(50)]
            await asyncio.sleep(0)
            for _ in range(20):
                assert (await at.ask(token)).status_code == 200
                assert (await at.ask(at.key)).status_code == 200
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {401}
            provider.thaw()
            provider.stop()
            for _ in range(20):
                assert (await at.ask(token)).status_code == 200


async def test_a_provider_that_comes_later_than_the_gateway_is_used_once_it_is_there(
    tmp_path: Path,
) -> None:
    with oidc_provider(tmp_path, ann=ACME) as provider:
        provider.stop()
        async with door(tmp_path, provider) as at:
            status, code, message = await at.refusal(_signed({"alg": "RS256"}, {}))
            assert (status, code) == (503, "unavailable")
            assert "keys are not known yet" in message
            assert (await at.ask(at.key)).status_code == 200
            await asyncio.to_thread(provider.start)
            token = await asyncio.to_thread(provider.token, "ann")

            async def is_served() -> bool:
                return (await at.ask(token)).status_code == 200

            await until(is_served)


async def test_forged_tokens_are_refused_by_name(tmp_path: Path) -> None:
    with oidc_provider(tmp_path, ann=ACME) as provider:
        async with door(tmp_path, provider) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            key = provider.key()
            named = {"kid": key["kid"]}
            public = jwt.PyJWK(key, "RS256").key
            pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            claims = _claims(provider)
            mine = rsa.generate_private_key(65537, 2048)
            elliptic = ec.generate_private_key(ec.SECP256R1())
            head, body, signature = token.split(".")
            other = _base64(json.dumps({**claims, "tenant": "keyed"}).encode())
            cases = {
                "none": (f"{_base64(_head('none', named))}.{body}.", "wrong_algorithm"),
                "no signature": (f"{head}.{body}.", "wrong_signature"),
                "HS256 with the public key": (_hs256(pem, named, body), "wrong_algorithm"),
                "HS256, kid only": (_hs256(b"x" * 64, named, body), "wrong_algorithm"),
                "my key, its name": (_signed({"alg": "RS256", **named}, claims, mine), "wrong_sig"),
                "my key inside": (
                    jwt.encode(claims, mine, "RS256", {**named, "jwk": _jwk(mine)}), "wrong_sig",
                ),
                "my elliptic key, its name": (
                    jwt.encode(claims, elliptic, "ES256", named), "wrong_algorithm",
                ),
                "other claims": (f"{head}.{other}.{signature}", "wrong_signature"),
                "unknown key": (_signed({"alg": "RS256", "kid": "x\u00e9\"\\"}, claims), "unknown"),
                "not a token": ("nonsense", "invalid_token"),
                "parts": ("a.b.c", "invalid_token"),
                "too long": ("a" * 9000, "invalid_token"),
                "no key": ("pdm_00000000_xxxx", "invalid_api_key"),
            }  # fmt: skip
            for name, (forged, code) in cases.items():
                answer = await at.ask(forged)
                error = answer.json()["error"]
                assert answer.status_code == 401, name
                assert error["code"].startswith(code), name
                assert "Traceback" not in answer.text, name
                assert forged not in answer.text, "a refusal quotes no token"
                told = await at.over_grpc(forged)
                assert (told.http_status, told.reason.lower()) == (401, error["code"]), name
            assert (await at.ask(token)).status_code == 200


async def test_a_flood_of_unknown_keys_asks_the_provider_seldom_and_stops_nobody(
    tmp_path: Path,
) -> None:
    with oidc_provider(tmp_path, ann=ACME) as provider:
        async with door(tmp_path, provider, oidc_early_refresh_s=2.0) as at:
            token = await asyncio.to_thread(provider.token, "ann")
            assert (await at.ask(token)).status_code == 200
            before, begun = _fetches(tmp_path), time.monotonic()
            claims = _claims(provider)
            key = rsa.generate_private_key(65537, 2048)
            for number in range(400):
                header = {"alg": "RS256", "kid": f"flood-{number}"}
                assert (await at.ask(_signed(header, claims, key))).status_code == 401
                if number % 20 == 0:
                    assert (await at.ask(token)).status_code == 200
            took_s = time.monotonic() - begun
            assert _fetches(tmp_path) - before <= 1 + took_s / 2.0


def _fetches(folder: Path) -> int:
    return (folder / "provider.log").read_text().count("/.well-known/openid-configuration")


def _claims(provider: OidcProvider) -> dict[str, Any]:
    now = int(time.time())
    return {
        "iss": provider.issuer, "aud": AUDIENCE, "sub": "eve", "iat": now, "exp": now + 600,
        "tenant": "acme",
    }  # fmt: skip


def _signed(header: dict[str, Any], claims: dict[str, Any], key: Any = None) -> str:
    key = key or rsa.generate_private_key(65537, 2048)
    return jwt.encode(claims, key, header["alg"], {k: v for k, v in header.items() if k != "alg"})


def _head(algorithm: str, more: dict[str, Any]) -> bytes:
    return json.dumps({"typ": "JWT", "alg": algorithm, **more}).encode()


def _hs256(secret: bytes, named: dict[str, Any], body: str) -> str:
    signed = f"{_base64(_head('HS256', named))}.{body}"
    return f"{signed}.{_base64(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def _jwk(key: rsa.RSAPrivateKey) -> dict[str, Any]:
    return jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
