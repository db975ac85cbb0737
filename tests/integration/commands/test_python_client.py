"""Uses the Python client against a real mesh with mutual TLS, an admin token and two blank
instances, which have no role yet.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from pdmesh.client import Client, MeshEvent
from pdmesh.errors import BadCertificates, InvalidRequest, MeshError, NotAllowed, Unavailable
from pdmesh.events.v1.events_pb2 import GroupStep
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net.tls.own_certificate import own_certificates, use_certificates, using_certificates
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT: Final = Path(__file__).parents[3]
TOKEN: Final = "the-operators-own-token"
GROUPS: Final = """
groups:
  assigned: {scenario: assigned, prefill: 1, decode: 1}
scenarios:
  assigned: {allow_single: true}
"""
CALL_S: Final = 60.0  # long enough for a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    spec = MeshSpec(
        engine="sim", num_blank=2, http_port=0, grpc_port=0, tls=True,
        env={"PDMESH_ADMIN_TOKEN": TOKEN},
    )  # fmt: skip
    before = own_certificates()
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running
    use_certificates(before)


def tls_dir(mesh: Mesh) -> Path:
    assert mesh.certificates is not None
    return mesh.certificates.path


def connect(mesh: Mesh, **changed: Any) -> AbstractAsyncContextManager[Client]:
    options: dict[str, Any] = {
        "admin_token": TOKEN, "mesh_token": mesh.token, "tls_dir": tls_dir(mesh),
        "nats_roles": True,
        "within_s": CALL_S,
    } | changed  # fmt: skip
    return Client.connect(mesh.nats_url, **options)


async def test_a_look_has_every_process_the_groups_and_what_instances_say(mesh: Mesh) -> None:
    async with connect(mesh) as client:

        async def is_whole() -> bool:
            return {"prefill-0", "decode-0"} <= set((await client.status()).answers)

        await until(is_whole)
        seen = await client.status()
    assert seen.epoch is not None
    assert seen.groups is not None
    assert {r.service for r in seen.records.values()} == {
        "gateway", "master-scheduler", "kv-cache-index", "health-monitor", "prefill", "decode",
        "instance",
    }  # fmt: skip
    assert seen.states["prefill-0"].record.instance_id == "prefill-0"


async def test_a_change_is_applied_followed_by_its_events_and_taken_back(mesh: Mesh) -> None:
    steps: list[MeshEvent] = []

    async def follow(client: Client) -> None:
        async for event in client.events(domains=["group"]):
            steps.append(event)  # noqa: PERF401  read by others while it grows

    async with connect(mesh) as client:
        following = asyncio.create_task(follow(client))
        assert await client.desired() is None
        (change, *_) = (await client.diff(GROUPS)).changes
        assert change.path.startswith(("groups", "scenarios"))
        applied = await client.apply(GROUPS, author="ann", reason="more", expected_version=0)

        async def is_serving() -> bool:
            return [g.state for g in (await client.groups()).groups] == ["serving"]

        await until(is_serving)
        await until(lambda: any(isinstance(e.message, GroupStep) for e in steps))
        assert {event.domain for event in steps} == {"group"}
        assert "assigned" in {event.about for event in steps}
        with pytest.raises(MeshError, match="version"):
            await client.apply("groups: {}", author="bob", expected_version=0, allow_empty=True)
        current = await client.desired()
        assert current is not None
        assert (current.text, current.author, current.reason) == (
            GROUPS, "ann", "more",
        )  # fmt: skip
        assert (await client.history()).versions[0].version == applied.version
        following.cancel()


async def test_an_instance_leaves_and_comes_back(mesh: Mesh) -> None:
    async with connect(mesh) as client:
        await client.cordon("decode-0", reason="a new fan")

        async def out() -> list[str]:
            return [each.instance_id for each in (await client.groups()).out_of_service]

        assert await out() == ["decode-0"]
        await client.uncordon("decode-0")
        assert await out() == []


async def test_what_is_wrong_with_a_caller_is_said_as_a_typed_error(mesh: Mesh) -> None:
    async with connect(mesh, admin_token="wrong") as client:
        with pytest.raises(NotAllowed):
            await client.groups()
        # The client still gets the rest of the status.
        assert (await client.status()).groups is None
    async with connect(mesh, within_s=CALL_S) as client:
        with pytest.raises(InvalidRequest):
            await client.apply("groups: 7", author="ann")
        with pytest.raises(InvalidRequest, match="there is no grup"):
            await anext(client.events(domains=["grup"]))
    with pytest.raises(BadCertificates):
        async with connect(mesh, tls_dir=mesh.state_dir / "nothing"):
            pass
    with pytest.raises(InvalidRequest, match="not of the form scheme"):
        async with Client.connect("nats://a:b@c:d"):
            pass


# nats-py leaves the connections of its failed attempts to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_client_that_nats_does_not_know_does_not_wait_forever(mesh: Mesh) -> None:
    """Once, the client waited forever, even under asyncio.timeout. nats-py retried and swallowed
    the cancellation.
    """
    with using_certificates(None), pytest.raises(Unavailable, match="NATS does not answer"):
        async with Client.connect(re.sub(r"//.*@", "//nobody:nothing@", mesh.nats_url)):
            pass


async def test_the_example_of_the_docs_runs(mesh: Mesh) -> None:
    page = (ROOT / "docs/python-client.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PDMESH_NATS_URL": mesh.nats_url,
            "PDMESH_ADMIN_TOKEN": TOKEN,
            "PDMESH_MESH_TOKEN": mesh.token,
            "PDMESH_TLS_DIR": str(tls_dir(mesh)),
            "PDMESH_NATS_ROLES": "true",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "prefill-0 prefill 127.0.0.1:" in done.stdout


async def test_the_overview_has_what_the_leader_hears_as_far_as_its_role_at_nats_goes(
    mesh: Mesh,
) -> None:
    """The overview must show the leader's own changes and the events that the health-monitor and
    gateways send in their NATS accounts.
    """
    async with connect(mesh) as client:
        with pytest.raises(InvalidRequest, match="this master knows no request nothing"):
            await client.request_story("nothing")
        assert (await client.answers()).step_s > 0
        await client.cordon("decode-0", reason="a new fan", at_once=True)
        await client.uncordon("decode-0")

        async def is_told() -> bool:
            told = {
                (h.kind, h.about, h.what.split()[0]) for h in (await client.overview()).happenings
            }
            return {
                ("change", "decode-0", "CordonInstance"),
                ("change", "decode-0", "UncordonInstance"),
            } <= told

        await until(is_told)
        overview = await client.overview()
        assert (overview.caller.role, overview.caller.shown_by) == ("admin", "admin_token")
        assert {"prefill-0", "decode-0"} <= {each.instance_id for each in overview.instances}
        mesh.kill("decode-0")

        async def is_an_incident() -> bool:
            incidents = (await client.overview()).incidents
            return any(each.instance_id == "decode-0" and each.steps for each in incidents)

        await until(is_an_incident)
