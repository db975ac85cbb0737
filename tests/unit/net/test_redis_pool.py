"""A question to a Redis sentinel leaves no connection open, however the question ends."""

from __future__ import annotations

import asyncio

from redis.asyncio import ConnectionPool

from pdmesh.core.server_urls import SentinelUrl
from pdmesh.net.redis_pool import Primary
from tests.support.waiting import until


class Sentinel:
    """A sentinel that does not know the primary."""

    def __init__(self) -> None:
        self.has_answered = asyncio.Event()
        self.num_closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"HELLO\r\n":
                writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            elif line == b"CLIENT\r\n":
                writer.write(b"-ERR unknown command\r\n")
            elif line.startswith(b"SENTINEL"):
                writer.write(b"*0\r\n")
                self.has_answered.set()
        self.num_closed += 1
        writer.close()


async def test_a_question_that_is_cancelled_after_its_answer_closes_its_connection() -> None:
    """redis-py needs several steps of the event loop to close a connection. A cancellation may come
    at each of them.
    """
    sentinel = Sentinel()
    server = await asyncio.start_server(sentinel.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = SentinelUrl.parse(f"redis-sentinel://127.0.0.1:{port}/0?primary=p")
        # the cancellation comes after this many steps of the event loop
        num_steps, is_answered = 0, False
        while not is_answered:
            primary = Primary(url, {"driver_info": None}, ConnectionPool())
            asking = asyncio.create_task(primary._ask("127.0.0.1", port))
            await sentinel.has_answered.wait()
            sentinel.has_answered.clear()
            for _ in range(num_steps):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            is_answered = not asking.cancelled()
            num_steps += 1
            await until(lambda num=num_steps: sentinel.num_closed == num)
