"""The simplest gateway: aiohttp passes bytes to one server and back.

    python -m loadtests.harness.passthrough UPSTREAM_PORT

Measurements compare our gateway with this one, measured in the same minutes. Its rate and its TTFT
show how fast the machine is at that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Final

from aiohttp import ClientSession, TCPConnector, web

from loadtests.harness.client import event_loop_factory

_HOP_BY_HOP: Final = frozenset({"transfer-encoding", "content-length", "connection"})


async def _serve(upstream: str) -> None:
    async with ClientSession(upstream, connector=TCPConnector(limit=0)) as session:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            async with session.post(request.path, data=body, headers=request.headers) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                response.content_length = answer.content_length
                with contextlib.suppress(ConnectionResetError):  # the client has gone
                    await response.prepare(request)
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                return response

        app = web.Application()
        app.router.add_post("/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the parent closes it or exits


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as loop:
        loop.run(_serve(f"http://127.0.0.1:{int(sys.argv[1])}"))
