"""The host's end of the control socket: one connection per rank of this engine's workers.

The host is the part of an instance outside its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from pdmesh.engine.vllm.messages import (
    FrameBuffer,
    RankHello,
    RankMessage,
    ToHost,
    decode_to_host,
    encode_frame,
)

log = structlog.get_logger(__name__)

_CLOSE_S = 1.0


class WorkerLost(Exception):
    """A worker closed its connection, or sent bytes that are not a message or cannot be handled."""


class ControlServer:
    """Listens before the workers start. `ready` has the RankHello of every rank, in rank order."""

    def __init__(
        self, on_message: Callable[[ToHost], None], on_lost: Callable[[WorkerLost], None]
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hellos: dict[int, RankHello] = {}
        self._is_closing = False
        self.ready: asyncio.Future[list[RankHello]] = asyncio.get_running_loop().create_future()

    async def listen(self, path: Path) -> None:
        """`path` lies in a private directory. Raises OSError if it cannot be bound."""
        self._server = await asyncio.start_unix_server(self._serve, str(path))

    def broadcast(self, message: RankMessage) -> None:
        """Send to every rank.

        Messages are small and rare, so the write buffer needs no limit.
        """
        frame = encode_frame(message)
        for writer in self._writers.values():
            writer.write(frame)

    async def close(self) -> None:
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        if self._writers:
            closing = [asyncio.ensure_future(w.wait_closed()) for w in self._writers.values()]
            await asyncio.wait(closing, timeout=_CLOSE_S)
        if not self.ready.done():
            self.ready.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames, rank = FrameBuffer(), -1
        reason = "its connection ended"
        try:
            while data := await reader.read(65536):
                for frame in frames.feed(data):
                    message = decode_to_host(frame)
                    if isinstance(message, RankHello):
                        rank = message.rank
                        self._greet(message, writer)
                    else:
                        self._on_message(message)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            reason = f"{error.__class__.__name__} on its connection"
        except Exception as error:
            log.exception("vllm.control.died")
            reason = f"a bug in handling its message: {error.__class__.__name__}"
        finally:
            with contextlib.suppress(OSError):
                writer.close()
        if not self._is_closing:
            self._on_lost(WorkerLost(f"worker {rank if rank >= 0 else '?'}: {reason}"))

    def _greet(self, hello: RankHello, writer: asyncio.StreamWriter) -> None:
        self._writers[hello.rank] = writer
        self._hellos[hello.rank] = hello
        log.debug("vllm.worker.connected", rank=hello.rank, pid=hello.pid)
        if len(self._hellos) == hello.num_ranks and not self.ready.done():
            self.ready.set_result([self._hellos[r] for r in sorted(self._hellos)])
