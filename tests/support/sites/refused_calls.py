"""Finds the status with which a server refuses a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc


async def refusal(call: Callable[[], Awaitable[object]]) -> grpc.aio.AioRpcError | None:
    """Repeat a call until the client gets the server's status. None means that the call succeeded.

    If a server refuses a stream before the client writes its first request, gRPC's client may
    report INTERNAL instead of the server's status.
    """
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.INTERNAL:
                return exc
        else:
            return None
