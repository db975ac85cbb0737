"""Moves KV between two KV agents over UCX. The agents use arenas for device memory, with the
checksums of a GPU.

The memory is the host's, so only CUDA's own copies are not tested. A sender's first message, META,
names the kind of the checksums, and a receiver checks either kind in either memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdmesh.core.instance.arena import ArenaRange  # noqa: E402
from pdmesh.core.kv.layout.buffer_layout import KvLayout  # noqa: E402
from pdmesh.core.kv.transfer.ticket import Ticket  # noqa: E402
from pdmesh.errors import KvTransferFailed  # noqa: E402
from pdmesh.kv.agent.agent import KvAgent  # noqa: E402
from pdmesh.kv.agent.arena_memory import AgentMemory, HostArena  # noqa: E402
from pdmesh.kv.agent.types import AgentHooks, AgentIdentity  # noqa: E402
from pdmesh.kv.device.arena import DeviceArena  # noqa: E402
from pdmesh.kv.transport.base import KvBytes  # noqa: E402
from pdmesh.kv.transport.memory_access import fill, flip_bit, host_view  # noqa: E402
from pdmesh.kv.transport.ucx import UcxTransport  # noqa: E402

SIZES = {"small": KvLayout(2, 3, 1000, "m"), "large": KvLayout(4, 64, 40_003, "m")}


def arena(kind: str, size: int) -> Any:
    return DeviceArena(size, "cpu") if kind == "device" else HostArena(size)


class Damage(AgentHooks):
    def on_received(self, payload: KvBytes) -> None:
        flip_bit(payload)


@pytest.mark.req("S50", "S57")
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize(
    ("sends", "receives"), [("device", "device"), ("device", "host"), ("host", "device")]
)
async def test_bytes_arrive_verified_whatever_the_memory_of_either_end(
    sends: str, receives: str, is_damaged: bool, size: str
) -> None:
    layout = SIZES[size]
    place = ArenaRange(64, layout.total_bytes)
    data = np.random.default_rng(1).integers(0, 256, place.length, np.uint8)
    staging, landing = arena(sends, place.offset + place.length), arena(receives, 16 << 20)
    sender = KvAgent(
        UcxTransport(), AgentIdentity("p", 1, "m"), AgentMemory(staging, HostArena(0)),
        lambda _: None,
    )  # fmt: skip
    receiver = KvAgent(
        UcxTransport(), AgentIdentity("d", 2, "m"), AgentMemory(HostArena(0), landing),
        lambda _: None, hooks=Damage() if is_damaged else None,
    )  # fmt: skip
    address = await sender.start()
    await receiver.start()
    try:
        fill(sender.staging(place), data.data)
        sender.stage("t", 1, place, layout, 30.0)
        ticket = Ticket(
            "t", "r", 1, "p", 1, "m", layout.num_blocks, place.length, (address,), 30_000
        )
        pull = asyncio.create_task(receiver.pull(ticket, place, deadline_s=30))
        if is_damaged:
            with pytest.raises(KvTransferFailed, match="KV_CORRUPT"):
                await pull
            return
        assert (await pull).num_bytes == place.length
        assert bytes(host_view(receiver.landing(place))) == data.tobytes()
    finally:
        await receiver.close()
        await sender.close()
