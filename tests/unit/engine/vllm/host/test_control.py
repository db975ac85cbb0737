"""The frames that a vLLM worker and its host exchange over a socket."""

from __future__ import annotations

import asyncio
import struct
import threading
from pathlib import Path

import msgspec
import pytest

from pdmesh.engine.vllm.host.control import ControlServer, WorkerLost
from pdmesh.engine.vllm.messages import (
    MAX_FRAME,
    FrameBuffer,
    RankHello,
    Release,
    Staged,
    ToHost,
    ToWorker,
    WorkerControl,
    decode_to_host,
    encode_frame,
)

HELLO = RankHello(0, 1, 4242, "127.0.0.1:1", "fp", 10, 4096, 2)


def test_frames_are_found_wherever_the_stream_was_cut() -> None:
    data = encode_frame(Staged(0, "t1")) + encode_frame(HELLO)
    frames = FrameBuffer()
    found = [frame for i in range(len(data)) for frame in frames.feed(data[i : i + 1])]
    assert [decode_to_host(frame) for frame in found] == [Staged(0, "t1"), HELLO]


def test_an_endless_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="control frame"):
        FrameBuffer().feed(struct.pack("<I", MAX_FRAME + 1))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_host(msgspec.msgpack.encode(Release("t1")))


async def test_a_worker_greets_gets_messages_and_its_end_is_detected(tmp_path: Path) -> None:
    lost: asyncio.Queue[WorkerLost] = asyncio.Queue()
    heard: asyncio.Queue[ToHost] = asyncio.Queue()
    told: list[ToWorker] = []
    was_told = threading.Event()

    def on_told(message: ToWorker) -> None:
        told.append(message)
        was_told.set()

    server = ControlServer(heard.put_nowait, lost.put_nowait)
    await server.listen(tmp_path / "c.sock")
    worker = await asyncio.to_thread(WorkerControl, str(tmp_path / "c.sock"), on_told, lambda: None)
    worker.send(HELLO)
    assert await asyncio.wait_for(server.ready, 30) == [HELLO]
    worker.send(Staged(0, "t1"))
    assert await asyncio.wait_for(heard.get(), 30) == Staged(0, "t1")
    server.broadcast(Release("t1"))
    assert await asyncio.to_thread(was_told.wait, 30)
    assert told == [Release("t1")]
    worker.close()
    assert "worker 0" in str(await asyncio.wait_for(lost.get(), 30))
    await server.close()


async def test_a_worker_notices_that_its_host_is_gone(tmp_path: Path) -> None:
    closed = threading.Event()
    server = ControlServer(lambda _: None, lambda _: None)
    await server.listen(tmp_path / "c.sock")
    worker = await asyncio.to_thread(
        WorkerControl, str(tmp_path / "c.sock"), lambda _: None, closed.set
    )
    worker.send(HELLO)
    await asyncio.wait_for(server.ready, 30)
    await server.close()
    assert await asyncio.to_thread(closed.wait, 30)
    worker.close()


@pytest.mark.req("S14")
async def test_ranks_that_greet_in_any_order_are_listed_by_rank(tmp_path: Path) -> None:
    """The record has the address of each rank in the order of the devices. A greeting may be
    repeated.
    """
    server = ControlServer(lambda _: None, lambda _: None)
    await server.listen(tmp_path / "c.sock")
    hellos = [
        RankHello(rank, 3, 1 + rank, f"10.0.0.{rank}:1", "fp", 10, 4096, 2) for rank in range(3)
    ]
    workers = []
    for rank in (2, 0, 0, 1):
        worker = await asyncio.to_thread(
            WorkerControl, str(tmp_path / "c.sock"), lambda _: None, lambda: None
        )
        worker.send(hellos[rank])
        workers.append(worker)
        if rank != 1:
            assert not server.ready.done()
    assert await asyncio.wait_for(server.ready, 30) == hellos
    await server.close()
    for worker in workers:
        worker.close()


async def test_a_bug_at_either_end_closes_the_connection(tmp_path: Path) -> None:
    """Otherwise later messages would be lost, and each end would take the other one for healthy."""

    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    lost: asyncio.Queue[WorkerLost] = asyncio.Queue()
    path, closed = str(tmp_path / "c.sock"), threading.Event()
    server = ControlServer(broken, lost.put_nowait)
    await server.listen(Path(path))
    deaf = await asyncio.to_thread(WorkerControl, path, broken, closed.set)
    deaf.send(HELLO)
    await asyncio.wait_for(server.ready, 30)
    server.broadcast(Release("t1"))
    assert await asyncio.to_thread(closed.wait, 30)
    deaf.send(Staged(0, "t1"))
    reason = await asyncio.wait_for(lost.get(), 30)
    assert "a bug in handling its message: RuntimeError" in str(reason)
    deaf.close()
    await server.close()
