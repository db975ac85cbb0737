"""Tests that the turns of a chat go to one decode while the decode has room, and to another one
otherwise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites import fleet
from tests.support.streams import stream_completion
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CHATS, NUM_TURNS, NUM_SLOTS = 8, 6, 3


class Chats:
    """Clients of a mesh with two decodes. `decode_of` has the decode that served each request."""

    def __init__(self, mesh: Mesh, client: httpx.AsyncClient) -> None:
        self.mesh, self.client = mesh, client
        self.decode_of: dict[str, str] = {}  # the keys are request ids

    async def hear(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        self.decode_of[event.request_id] = event.decode_id

    async def turn(self, chat_id: str, prompt: list[int]) -> str:
        """Ask the mesh and return the decode that served this turn."""
        body: dict[str, Any] = {"model": "default", "prompt": prompt, "max_tokens": 4}
        url = f"{self.mesh.http_url}/v1/completions"
        answer = await self.client.post(url, json={**body, "ignore_eos": True, "chat_id": chat_id})
        assert answer.status_code == 200, answer.text
        request_id = answer.headers["x-request-id"]
        await until(lambda: request_id in self.decode_of)
        return self.decode_of[request_id]

    def num_used(self, decode: str) -> float:
        samples = fleet.samples(self.mesh, decode)
        return next(v for name, _, v in samples if name == "pdmesh_slots_used")

    @asynccontextmanager
    async def filled(self, chat_id: str, home: str) -> AsyncIterator[None]:
        """Fill all slots of the chat's decode with long answers of the same chat."""
        long = [
            asyncio.create_task(
                stream_completion(
                    self.client, self.mesh.http_url, [50 + n] * 70, 1800, ignore_eos=True,
                    chat_id=chat_id,
                )
            )
            for n in range(NUM_SLOTS)
        ]  # fmt: skip
        try:
            await until(lambda: self.num_used(home) == NUM_SLOTS)
            yield
            assert not any(task.done() for task in long), "they answered all the while"
        finally:
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            await until(lambda: self.num_used(home) == 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chats]:
    spec = MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=2,
        http_port=0,
        grpc_port=0,
        start_timeout_s=180,
        env={
            "PDMESH_DECODE_NUM_SLOTS": str(NUM_SLOTS),
            "PDMESH_DECODE_MAX_WAITING": "0",
            "PDMESH_DECODE_SIM_LAW": "smollm2-cpu",
            # A gateway without a plan from the master does not know the decode of a chat.
            "PDMESH_GATEWAY_PLAN_TIMEOUT_S": "60",
        },
    )
    async with (
        Mesh(spec, tmp_path_factory.mktemp("mesh")) as mesh,
        httpx.AsyncClient(timeout=120) as client,
    ):
        running = Chats(mesh, client)
        bus = await NatsBus.connect(mesh.nats_url, "test-chats")
        await bus.subscribe(subjects.request_finished(), running.hear)
        yield running
        await bus.close()


def prompt_of(chat: int, turn: int) -> list[int]:
    return [40 + (chat * 11 + i) % 80 for i in range(30 + 20 * turn)]


@pytest.mark.req("S94")
async def test_every_turn_of_a_chat_goes_to_the_decode_of_its_first(chats: Chats) -> None:
    """The chat id keeps the turns of a chat together. Without an id, the turns of one conversation
    spread.
    """
    homes: dict[int, set[str]] = defaultdict(set)
    strays: dict[int, set[str]] = defaultdict(set)
    for turn in range(NUM_TURNS):
        for chat in range(NUM_CHATS):
            homes[chat].add(await chats.turn(f"chat-{chat}", prompt_of(chat, turn)))
            strays[chat].add(await chats.turn("", prompt_of(chat, turn)))
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set().union(*homes.values())) == 2, "chats are spread over the decodes"
    assert any(len(stray) == 2 for stray in strays.values())


@pytest.mark.req("S94")
async def test_a_turn_goes_elsewhere_while_its_decode_is_full(chats: Chats) -> None:
    """The turn does not wait for the decode of its chat. Afterwards the chat stays at the other
    decode.
    """
    home = await chats.turn("busy", prompt_of(1, 0))
    assert await chats.turn("busy", prompt_of(1, 1)) == home
    async with chats.filled("busy", home):
        moved = await chats.turn("busy", prompt_of(1, 2))
        assert moved != home
    assert await chats.turn("busy", prompt_of(1, 3)) == moved


@pytest.mark.req("S94")
async def test_a_turn_goes_elsewhere_when_its_decode_is_dead(chats: Chats) -> None:
    home = await chats.turn("orphan", prompt_of(2, 0))
    assert await chats.turn("orphan", prompt_of(2, 1)) == home
    chats.mesh.kill(home)
    turns = [await chats.turn("orphan", prompt_of(2, 2 + n)) for n in range(3)]
    assert home not in turns
    await chats.mesh.wait_ready(timeout_s=180)
    assert await chats.turn("orphan", prompt_of(2, 5)) == turns[-1], "it stays where its KV is"
