"""Runs every command that changes a mesh.

The tests check who may run it, and what NATS and the log report about it. Operators show tokens of
a real OpenID provider, or API keys with a role.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.operator_roles import NEEDED, ROLES, AdminRole
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.errors import InvalidToken, MeshError, NotAllowed
from pdmesh.events.v1.events_pb2 import AdminChange
from pdmesh.launcher.mesh import Mesh
from pdmesh.net import subjects
from pdmesh.net.bus import Message as BusMessage
from pdmesh.net.events import decode_event
from pdmesh.net.grpc.admin_client import call_leader
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1 import overview_pb2 as looks
from tests.fakes.lora_adapters import write_adapter
from tests.support.sites.groups import spec
from tests.support.sites.oidc_provider import AUDIENCE, OidcProvider, oidc_provider
from tests.support.sites.operator import CHANGE_S
from tests.support.waiting import until

ADMIN_TOKEN = "the-admin-token-of-this-test"
LORA = {"PDMESH_ENABLE_LORA": "true", "PDMESH_MAX_LORAS": "2", "PDMESH_MAX_LORA_RANK": "8"}
TIERS = {"PDMESH_KV_HOST_POOL_BYTES": str(4 << 20)}
USERS: dict[str, dict[str, Any]] = {
    "nobody": {"email": "n@x.org"},
    **{name: {"email": f"{name}@x.org", "roles": [f"pdmesh-{name}"]} for name in ROLES},
}


def desired(option: str = "") -> str:
    return f"""
services:
  model:
    options:
      sim_num_layers: 2
      {option}
scenarios:
  default:
    service: model
    upgrade: {{soak_s: 2}}
groups:
  chat: {{count: 2, prefill: 1, decode: 1}}
"""


@dataclass
class Told:
    """An audit event, with the states before and after as plain dictionaries."""

    who: str
    shown_by: str
    role: str
    author: str
    address: str
    action: str
    about: str
    reason: str
    before: dict[str, Any]
    after: dict[str, Any]

    @classmethod
    def of(cls, event: AdminChange) -> Told:
        texts = {each.name: getattr(event, each.name) for each in fields(cls)}
        return cls(**{**texts, **{n: MessageToDict(texts[n]) for n in ("before", "after")}})


@dataclass
class Site:
    mesh: Mesh
    bus: NatsBus
    provider: OidcProvider
    keys: dict[str, str]
    keys_path: Path
    told: list[Told] = field(default_factory=list)

    async def listen(self) -> None:
        await self.bus.subscribe(subjects.admin_changed(), self._on_change)

    async def _on_change(self, message: BusMessage) -> None:
        self.told.append(Told.of(decode_event(message, AdminChange)))

    async def call(self, token: str, method: str, request: Message | None = None) -> Any:
        made = getattr(pb, f"{method}Request", None) or getattr(looks, f"{method}Request")
        sent = made() if request is None else request
        return await call_leader(
            self.bus,
            token,
            lambda stub, metadata, s: getattr(stub, method)(sent, metadata=metadata, timeout=s),
            within_s=CHANGE_S,
            mesh_token=self.mesh.wiring.mesh_token,
        )

    async def refusal(self, token: str, method: str) -> MeshError | None:
        """The error that an empty request gets, or None if the request is served."""
        try:
            await self.call(token, method)
        except MeshError as exc:
            return exc
        return None

    async def changed(self, token: str, request: Message) -> Told:
        """Make a change, check the log, and return the change's only audit event."""
        num = len(self.told)
        method = type(request).__name__.removesuffix("Request")
        await self.call(token, method, request)
        await until(lambda: len(self.told) > num)
        (event,) = self.told[num:]
        assert event.action == method
        self.check_log(event)
        return event

    def check_log(self, event: Told) -> None:
        path = self.mesh.log_file("master-scheduler")
        lines = [json.loads(line) for line in path.read_text().splitlines() if "admin.cha" in line]
        (line,) = [each for each in lines[-1:] if each["event"] == "admin.changed"]
        assert {name: line[name] for name in vars(event)} == vars(event)


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    with oidc_provider(folder, 3600, 0, **USERS) as provider:
        file = KeyFile(tenants={"ops": TenantEntry()})
        keys = {str(role): api_keys.issue(file, "ops", role=role) for role in AdminRole}
        keys["none"] = api_keys.issue(file, "ops")
        api_keys.save(folder / "keys.json", file)
        groups = folder / "groups.yaml"
        groups.write_text(desired())
        environment = {
            **LORA, **TIERS, "PDMESH_ADMIN_TOKEN": ADMIN_TOKEN,
            "PDMESH_OIDC_ISSUER": provider.issuer, "PDMESH_OIDC_AUDIENCE": AUDIENCE,
            "PDMESH_OIDC_ROLE_CLAIM": "roles",
        }  # fmt: skip
        mesh_spec = replace(
            spec(groups, num_blank=5), keys_file=folder / "keys.json", env=environment
        )
        async with Mesh(mesh_spec, folder / "mesh") as mesh:
            bus = await NatsBus.connect(mesh.nats_url, "test")
            try:
                found = Site(mesh, bus, provider, keys, folder / "keys.json")
                await found.listen()
                yield found
            finally:
                await bus.close()


@pytest.mark.timeout(600)
async def test_roles_and_audit_of_all_commands(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        tokens = {user: await asyncio.to_thread(at.provider.token, user) for user in USERS}
        await _check_roles(at, tokens)
        await _check_page(at, tokens)
        await _check_commands(at, tokens)
        assert at.told == [], "who is refused, or only reads, changes nothing"
        await _until_serving(at, tokens)
        await _check_changes(at, tokens, tmp_path)
        assert {e.action for e in at.told} == {
            m for m, role in NEEDED.items() if role > AdminRole.VIEWER
        }
        await _check_key_file(at)


async def _check_roles(at: Site, tokens: dict[str, str]) -> None:
    """A refusal must name the role. A caller with the role may get an error only because his
    request is empty.
    """
    for method, needed in NEEDED.items():
        for role, token in [*tokens.items(), *at.keys.items()]:
            has = ROLES.get(role)
            if method == "ApplyDesired" and has is AdminRole.ADMIN:
                continue  # an empty text would be a change that must be confirmed
            refused = await at.refusal(token, method)
            if has is None or has < needed:
                assert isinstance(refused, NotAllowed)
                assert f"{method} needs the role {needed}; " in refused.message
                assert refused.message.endswith(f" has {role if has else 'none'}")
            else:
                assert refused is None or refused.reason == "INVALID_REQUEST", (method, refused)
    for wrong in ("", "nonsense", "pdm_x_y"):
        with pytest.raises(NotAllowed):
            await at.call(wrong, "GetDesired")
    other = await asyncio.to_thread(at.provider.token, "admin", "another-service")
    with pytest.raises(InvalidToken, match="aud does not contain pdmesh"):
        await at.call(other, "GetDesired")


async def _check_page(at: Site, tokens: dict[str, str]) -> None:
    url = f"http://{at.mesh.ops_address('master-scheduler')}/admin"
    async with httpx.AsyncClient(timeout=60) as client:
        for role, method, status in (
            ("viewer", "GetDesired", 200), ("viewer", "CordonInstance", 403),
            ("operator", "ApplyDesired", 403), ("nobody", "GetDesired", 403),
        ):  # fmt: skip
            headers = {"authorization": f"Bearer {tokens[role]}"}
            answer = await client.post(f"{url}/{method}", json={}, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 403:
                assert f"needs the role {NEEDED[method]}" in answer.json()["error"]["message"]
        headers = {"authorization": f"Bearer {tokens['admin'][:-40]}{'A' * 40}"}
        answer = await client.post(f"{url}/GetDesired", json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (401, "WRONG_SIGNATURE")


async def _check_commands(at: Site, tokens: dict[str, str]) -> None:
    """`pdmesh` shows the token of its option `--token`, or else PDMESH_TOKEN."""

    async def run(token: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdmesh.cli.app", "--state-dir", str(at.mesh.state_dir)]
        tokens_of = {"PDMESH_TOKEN": token, "PDMESH_ADMIN_TOKEN": "wrong-wrong-wrong"}
        environment = {**os.environ, **tokens_of}
        return await asyncio.to_thread(
            subprocess.run, [*command, *words], env=environment, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip

    assert (await run(tokens["viewer"], "groups")).returncode == 0
    refused = await run(tokens["viewer"], "cordon", "instance-0")
    assert refused.returncode != 0
    said = "CordonInstance needs the role operator; viewer (viewer@x.org) has viewer"
    assert said in refused.stderr
    assert (await run("x.y.z", "groups", "--token", at.keys["viewer"])).returncode == 0


async def _until_serving(at: Site, tokens: dict[str, str]) -> None:
    async def are_serving() -> bool:
        states = await at.call(tokens["viewer"], "ListGroupStates")
        return [group.state for group in states.groups] == ["serving"] * 2

    await until(are_serving, within_s=4 * CHANGE_S)


async def _check_changes(at: Site, tokens: dict[str, str], folder: Path) -> None:
    admin, operator = tokens["admin"], tokens["operator"]
    states = await at.call(admin, "ListGroupStates")
    (spare,) = states.blank_instance_ids

    event = await at.changed(operator, pb.CordonInstanceRequest(
        instance_id=spare, mode=pb.LEAVE_MODE_AT_ONCE, reason="it is loud"))  # fmt: skip
    assert (event.who, event.shown_by) == ("operator (operator@x.org)", "token")
    assert event.role == "operator"
    assert (event.about, event.reason) == (spare, "it is loud")
    assert event.address.startswith("ipv4:127.0.0.1:")
    assert not event.before
    assert event.after["instance_id"] == spare

    event = await at.changed(at.keys["operator"], pb.UncordonInstanceRequest(instance_id=spare))
    assert event.who == f"ops/{at.keys['operator'].split('_')[1]}"
    assert event.before["reason"] == "it is loud"
    assert not event.after

    prefix = tokens_to_bytes(list(range(40, 100)) * 8)
    pin = pb.AddPinRequest(pin_id="a", prefix_token_ids=prefix, ttl_s=60, tenant="ops")
    event = await at.changed(operator, pin)
    assert (not event.before, event.after["tenant"]) == (True, "ops")
    assert "blocks" not in event.after
    event = await at.changed(operator, pb.RemovePinRequest(pin_id="a"))
    assert (event.before["tenant"], not event.after) == ("ops", True)

    write_adapter(folder / "lora", 1)
    added = pb.AddAdapterRequest(name="My_Lora", path=str(folder / "lora"))
    event = await at.changed(admin, added)
    assert (event.about, not event.before) == ("My_Lora", True)
    digest = event.after["digest"]
    event = await at.changed(admin, pb.RemoveAdapterRequest(name="My_Lora"))
    assert (event.before["digest"], not event.after) == (digest, True)

    move = pb.PendingMove(group_id="chat-0", kind="add", role="decode")
    event = await at.changed(operator, pb.PlanMovesRequest(moves=[move], reason="longer answers"))
    assert (event.about, event.reason) == ("default", "longer answers")
    assert len(event.after["decisions"]) == 1

    before = (await at.call(admin, "GetDesired")).desired
    changed = desired("sim_seed: 9")
    apply = pb.ApplyDesiredRequest(
        text=changed, author="eve", reason="another seed", canary_share=0.5
    )
    event = await at.changed(ADMIN_TOKEN, apply)
    assert (event.who, event.author, event.about) == ("admin-token", "eve", "desired")
    assert event.before["version"] == before.version
    assert event.after["version"] == before.version + 1
    assert event.after["canary_share"] == 0.5
    assert list(event.after["values"].values()) == ["9"], event.after
    num = len(at.told)
    await at.call(admin, "ApplyDesired", pb.ApplyDesiredRequest(text=changed))
    assert len(at.told) == num, "the same text changes nothing"

    async def is_promoted() -> bool:
        refused = await at.refusal(operator, "PromoteUpgrade")
        assert refused is None or "there is no canary" in refused.message
        return refused is None

    await until(is_promoted, within_s=CHANGE_S)
    await until(lambda: at.told[-1].action == "PromoteUpgrade")
    at.check_log(at.told[-1])
    assert at.told[-1].before["canary_shares"]["default"] == 0.5

    back = pb.RollbackDesiredRequest(version=before.version, author="eve", reason="it was wrong")
    event = await at.changed(operator, back)
    assert event.reason == "it was wrong"
    assert list(event.before["values"].values()) == ["9"]
    versions = (await at.call(admin, "ListDesiredVersions")).versions
    assert versions[0].author == "eve (operator (operator@x.org))"


async def _check_key_file(at: Site) -> None:
    """The key file has the tenants' limits. The leading master reads the file and reports its
    changes.
    """
    file = api_keys.load(at.keys_path)
    file.tenants["ops"] = TenantEntry(requests_per_s=5.0)
    api_keys.revoke(file, at.keys["none"].split("_")[1])
    api_keys.save(at.keys_path, file)
    await until(lambda: at.told[-1].action == "KeyFile")
    event = at.told[-1]
    assert (event.who, event.about) == ("file", "key-file")
    assert event.before["tenants"]["ops"]["requests_per_s"] is None
    assert event.after["tenants"]["ops"]["requests_per_s"] == 5.0
    (revoked,) = event.before["keys"].values()
    assert (revoked["role"], event.after["keys"]) == (None, {})
