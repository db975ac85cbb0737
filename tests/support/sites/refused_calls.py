"""The status of a call that a server refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc


async def refusal(call: Callable[[], Awaitable[object]]) -> grpc.aio.AioRpcError | None:
    """Call until the client has heard the server's status. None: the call was answered.

    If a server refuses a stream before its first request is written, gRPC's client may report
    INTERNAL instead of the server's status.
    """
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.INTERNAL:
                return exc
        else:
            return None
