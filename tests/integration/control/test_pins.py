"""Tests pins. A pin is an operator's order to keep the KV of a prefix, whatever other prompts come.
It ends when the operator removes it, or when its time is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands import pins
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.errors import InvalidRequest, MeshError, ModelNotFound, NotLeader
from pdmesh.events.v1.events_pb2 import PinChanged
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher, decode_event
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import pin_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.services.master_scheduler.admin.pins import Pins
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_PREFILL, InstanceRecord
from tests.support.sites import fleet, servers
from tests.support.waiting import until

BLOCK_TOKENS, BLOCK_BYTES = 64, 64 * 64 * 2
POOL_BLOCKS = 32
# The engine's cache and the host pool together hold only a small part of a flood of prompts.
SMALL = {
    "PDMESH_PREFILL_NUM_KV_BLOCKS": "40",
    "PDMESH_PREFILL_KV_HOST_POOL_BYTES": str(POOL_BLOCKS * BLOCK_BYTES),
    "PDMESH_MAX_MODEL_LEN": "1024",
}
SYSTEM = "Answer as a clerk of the harbour office would: " + "ships, berths, tides. " * 24
OTHER = "Answer as a keeper of the town's archive would: " + "deeds, maps, wills. " * 26


def spec() -> MeshSpec:
    return MeshSpec(
        engine="sim", num_prefill=1, num_decode=1, http_port=0, grpc_port=0, env=SMALL,
        start_timeout_s=180
    )  # fmt: skip


async def cached(client: httpx.AsyncClient, system: str, user: str) -> int:
    """How many tokens of the prompt the mesh did not have to compute."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "default", "messages": messages, "max_tokens": 2}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def flood(client: httpx.AsyncClient, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(24):
        prompt = [rng.randrange(40, 120) for _ in range(9 * BLOCK_TOKENS)]
        body = {"model": "default", "prompt": prompt, "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def command(mesh: Mesh, *arguments: str) -> int:
    """Run `pdmesh pins ...`."""
    options = build_parser().parse_args(["pins", *arguments, "--nats-url", mesh.nats_url])
    return await asyncio.to_thread(pins.run, options)


def pinned_blocks(mesh: Mesh) -> float:
    name = "pdmesh_kv_tier_pinned_blocks"
    return sum(value for n, _, value in fleet.samples(mesh, "prefill-0") if n == name)


@pytest.mark.req("S76", "S78", "S96")
async def test_a_pinned_system_prompt_is_still_there_when_everything_else_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text(SYSTEM)
    async with (
        Mesh(spec(), tmp_path / "mesh") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        for system in (SYSTEM, OTHER):
            assert await cached(client, system, "hello") == 0
        await command(
            mesh, "add", "harbour", "--system", str(prompt), "--url", mesh.http_url, "--ttl", "1h"
        )
        await until(lambda: pinned_blocks(mesh) == 6)

        await flood(client, seed=1)
        assert await cached(client, SYSTEM, "and what of the tide?") // BLOCK_TOKENS == 6
        assert await cached(client, OTHER, "and what of the map?") == 0

        capsys.readouterr()
        await command(mesh, "list")
        shown = capsys.readouterr().out
        assert "harbour" in shown
        assert "prefill-0 6/6" in shown

        await command(mesh, "remove", "harbour")
        await until(lambda: pinned_blocks(mesh) == 0)
        await flood(client, seed=2)
        assert await cached(client, SYSTEM, "and now?") == 0


# -- the leader's part, over a real NATS ----------------------------------------------------------

TOKENS = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))


class Leader:
    """The `Pins` of a leading master, with a clock that the test sets."""

    def __init__(self, bus: NatsBus, view: object) -> None:
        self.bus, self.view, self.now, self.epoch = bus, view, 1e9, 1
        self.index = PrefixIndex()
        self.pins = self.make()
        self.told: list[PinChanged] = []

    def make(self) -> Pins:
        events = EventPublisher(self.bus, "master-0", 1)
        leads = lambda: (self.epoch > 0, self.epoch)  # noqa: E731
        clock = lambda: self.now  # noqa: E731
        link = MeshLink(self.bus, self.view, events)  # type: ignore[arg-type]  # a view
        return Pins(pin_board(self.bus), self.index, link, b"k", leads, clock)

    def request(self, pin_id: str = "a", **changes: object) -> pb.AddPinRequest:
        fields = {
            "pin_id": pin_id,
            "tenant": "default",
            "prefix_token_ids": tokens_to_bytes(TOKENS),
            "ttl_s": 60,
        }
        return pb.AddPinRequest(**{**fields, **changes})  # type: ignore[arg-type]  # as the test names them


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    server = servers.nats(tmp_path)
    await server.start()
    bus = await NatsBus.connect(server.url, "test")
    registry = NatsRegistry(bus, 30.0)
    record = InstanceRecord(
        instance_id="prefill-0",
        incarnation=1,
        service="prefill",
        role=ROLE_PREFILL,
        model="m",
        model_fingerprint="fp",
        block_size=BLOCK_TOKENS,
        scenario="chat",
    )
    lease = await registry.register(record)
    view = await registry.watch()
    await until(lambda: "prefill-0" in view.records)
    made = Leader(bus, view)

    async def heard(message: Message) -> None:
        made.told.append(decode_event(message, PinChanged))

    await bus.subscribe(subjects.kv_pin(), heard)
    running = asyncio.create_task(made.pins.run())
    await until(lambda: _is_open(made.pins))
    yield made
    running.cancel()
    await asyncio.wait([running])
    await view.close()
    await lease.release()
    await bus.close()
    server.close()


def _is_open(of: Pins) -> bool:
    try:
        of.states()
    except MeshError:
        return False
    return True


@pytest.mark.req("S78")
async def test_a_pin_ends_with_its_time_and_every_change_is_reported(leader: Leader) -> None:
    state = await leader.pins.add(leader.request(), 1)
    assert [(c.model_fingerprint, c.num_blocks) for c in state.coverage] == [("fp", 3)]
    stored = leader.pins.known["a"]
    assert len(stored.blocks[0].names) == 3
    assert tokens_to_bytes(TOKENS)[:16] not in stored.SerializeToString(), (
        "the record has block names and no tokens"
    )
    await leader.pins.add(leader.request(reason="longer", ttl_s=120), 1)
    leader.now += 100
    await leader.pins.round()
    assert [pin.reason for pin in leader.pins.states()] == ["longer"]
    leader.now += 21
    await until(lambda: not leader.pins.states())  # the background task ends the pin
    await until(lambda: len(leader.told) == 3)
    assert [event.change for event in leader.told] == ["added", "replaced", "expired"]


@pytest.mark.fault("F21")
async def test_pins_are_written_again_when_their_bucket_was_lost(leader: Leader) -> None:
    await leader.pins.add(leader.request(), 1)
    await leader.bus.client.jetstream().delete_stream("KV_pdmesh-pins")
    other = leader.make()
    running = asyncio.create_task(other.run())
    try:
        await until(lambda: "a" in other.known)
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pin_id": "No spaces"}, "pin_id"),
        ({"tenant": ""}, "tenant"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"prefix_token_ids": b""}, "prefix_token_ids"),
        ({"prefix_token_ids": b"abc"}, "prefix_token_ids"),
        ({"prefix_token_ids": tokens_to_bytes(TOKENS[:63])}, "prefix_token_ids"),
        ({"prefix_token_ids": tokens_to_bytes([1] * BLOCK_TOKENS * 2049)}, "prefix_token_ids"),
        ({"scenario": "search"}, "scenario"),
    ],
)
async def test_the_refusal_of_a_prefix_that_cannot_be_pinned_names_the_field(
    leader: Leader, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await leader.pins.add(leader.request(**changes), 1)
    assert caught.value.field == field
    assert not leader.pins.known


async def test_pins_have_a_common_bound(leader: Leader) -> None:
    long = tokens_to_bytes(list(range(2000 * BLOCK_TOKENS)))
    await leader.pins.add(leader.request("long", prefix_token_ids=long), 1)
    with pytest.raises(InvalidRequest) as caught:
        await leader.pins.add(leader.request("more", prefix_token_ids=long), 1)
    assert caught.value.reason == "TOO_MANY_PINS"
    # A pin that replaces the one of the same id does not exceed the bound.
    await leader.pins.add(leader.request("long", prefix_token_ids=long), 1)
    for number in range(16):  # each of these pins has 3 blocks
        await leader.pins.add(leader.request(f"p{number}"), 1)
    with pytest.raises(InvalidRequest):
        await leader.pins.add(leader.request("last"), 1)


async def test_a_standby_and_an_unknown_model_pin_nothing(leader: Leader) -> None:
    with pytest.raises(ModelNotFound):
        await leader.pins.add(leader.request(model="other"), 1)
    leader.epoch = 2
    with pytest.raises(NotLeader):
        await leader.pins.add(leader.request(), 1)
    with pytest.raises(InvalidRequest):
        await leader.pins.remove("never", 2)
