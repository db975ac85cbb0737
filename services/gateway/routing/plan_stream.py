"""A gRPC stream over which the gateway asks one master for plans.

A plan names the instances that may serve a request. A query over the stream costs a third of a
separate call.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from pdmesh.errors import Unavailable
from pdmesh.net.grpc import rpc
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.scheduler_service_pb2 import PlanResponse, PlanStreamRequest
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs


class PlanStream:
    """A stream that `ask` opens, and opens again after it broke. It takes one `ask` at a time."""

    def __init__(self, master: InstanceRecord) -> None:
        self._channel = rpc.channel_to(master)
        # The types are Any because the stubs know only calls that take an iterator of requests.
        self._stub: Any = SchedulerServiceStub(self._channel)
        self._call: Any = None

    async def ask(self, asked: PlanStreamRequest, timeout_s: float) -> PlanResponse:
        """Send queries and return the answer. Raises the master's error, or Unavailable."""
        is_used = self._call is not None
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._exchange(asked)
                except Unavailable:
                    if not is_used:
                        raise
                    # The stream broke while it was idle, for example because the master was
                    # restarted.
                    return await self._exchange(asked)
        except TimeoutError as exc:
            raise Unavailable("the master did not answer in time") from exc

    async def _exchange(self, asked: PlanStreamRequest) -> PlanResponse:
        """Ask over the stream. If this fails, close it, so that the next query opens a new one."""
        if self._call is None:
            self._call = self._stub.PlanStream()
        call, is_answered = self._call, False
        try:
            await call.write(asked)
            response = await call.read()
            is_answered = response is not _EOF
        except grpc.aio.AioRpcError as exc:
            raise rpc.from_rpc_error(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise Unavailable("the stream of plans had ended") from exc
        finally:
            if not is_answered:
                self._call = None
                call.cancel()
        if not is_answered:
            raise Unavailable("the master ended the stream of plans")
        plan: PlanResponse = response.response
        return plan

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        await self._channel.close(None)
