"""Serves InstanceService over gRPC.

It passes the commands of gateways to the host, and the host's output back to the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import structlog

from pdmesh.core.adapters.adapter import check_path
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import InvalidRequest, WrongIncarnation
from pdmesh.instance.legs import instruments
from pdmesh.instance.legs.host import InstanceHost
from pdmesh.instance.legs.model_text import ModelTextSource
from pdmesh.instance.legs.outbox import Outbox
from pdmesh.instance.legs.publishing import KvBlocksPublisher
from pdmesh.net.grpc.peers import caller_of, check_says
from pdmesh.text_files import TextFiles
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import (
    GetKvSnapshotRequest,
    GetKvSnapshotResponse,
    GetModelTextRequest,
    GetModelTextResponse,
    GetStatusRequest,
    GetStatusResponse,
    Hello,
    InspectAdapterRequest,
    InspectAdapterResponse,
    SessionRequest,
    SessionResponse,
)

log = structlog.get_logger(__name__)

_HASHES_PER_PART: Final = 32_768  # half a megabyte
Context = grpc.aio.ServicerContext[Any, Any]


class InstanceServicer:
    """`record` makes the instance's present registry record. `text` has the tokenizer files."""

    def __init__(
        self,
        host: InstanceHost,
        record: Callable[[], InstanceRecord],
        blocks: KvBlocksPublisher,
        text: TextFiles | None = None,
    ) -> None:
        self._host, self._record, self._blocks = host, record, blocks
        self._text = ModelTextSource(text)

    async def Session(  # noqa: N802  # gRPC's name
        self, requests: AsyncIterator[SessionRequest], context: Context
    ) -> AsyncIterator[SessionResponse]:
        first = await anext(requests, None)
        if first is None or not first.commands:
            raise InvalidRequest("a session must begin with hello", field="commands")
        hello = self._check(first.commands[0].hello)
        check_says(caller_of(context), hello.gateway_id, "gateway_id")
        outbox = self._host.open(hello.gateway_id)
        writer = asyncio.current_task()
        assert writer is not None
        outbox.on_cut = lambda: self._cut(outbox, writer)
        # gRPC may drop this generator without closing it, but it always calls the callback.
        context.add_done_callback(lambda _: self._host.close(outbox))  # type: ignore[arg-type]  # stub
        reader = asyncio.create_task(self._read(first, requests, outbox), name="session-reader")
        try:
            while (response := await outbox.next()) is not None:
                yield response
            if reader.done():
                reader.result()  # raises the error that ended the session, if there is one
        finally:
            reader.cancel()
            self._host.close(outbox)

    def _check(self, hello: Hello) -> Hello:
        record = self._record()
        if not hello.gateway_id:
            raise InvalidRequest("a session must begin with hello", field="commands")
        if (hello.instance_id, hello.incarnation) != (record.instance_id, record.incarnation):
            raise WrongIncarnation("the session is for another instance or incarnation")
        return hello

    async def _read(
        self, first: SessionRequest, requests: AsyncIterator[SessionRequest], outbox: Outbox
    ) -> None:
        try:
            self._host.apply(outbox, first.commands[1:])
            async for request in requests:
                self._host.apply(outbox, request.commands)
        finally:
            outbox.close()

    def _cut(self, outbox: Outbox, writer: asyncio.Task[object]) -> None:
        log.warning("session.cut", gateway_id=outbox.gateway_id)
        instruments.sessions_cut.add(1)
        writer.cancel()

    async def GetStatus(  # noqa: N802
        self, request: GetStatusRequest, context: Context
    ) -> GetStatusResponse:
        host = self._host
        return GetStatusResponse(
            record=self._record(),
            load=host.load(),
            num_running=host.num_running,
            num_tickets=host.num_tickets,
            staging_bytes_used=host.admission.staging_bytes_used,
            num_sessions=host.num_sessions,
            num_retrieving=host.admission.num_retrieving,
        )

    async def GetModelText(  # noqa: N802
        self, request: GetModelTextRequest, context: Context
    ) -> AsyncIterator[GetModelTextResponse]:
        async with contextlib.aclosing(self._text.pieces(request.digest)) as pieces:
            async for piece in pieces:
                yield piece

    async def InspectAdapter(  # noqa: N802
        self, request: InspectAdapterRequest, context: Context
    ) -> InspectAdapterResponse:
        check_path(request.path)
        facts = await self._host.engine.inspect_adapter(request.path)
        return InspectAdapterResponse(
            digest=facts.digest, rank=facts.rank, num_bytes=facts.num_bytes
        )

    async def GetKvSnapshot(  # noqa: N802
        self, request: GetKvSnapshotRequest, context: Context
    ) -> AsyncIterator[GetKvSnapshotResponse]:
        sequence, by_tier = self._blocks.snapshot()
        incarnation = self._record().incarnation
        by_tier.setdefault(Tier.ENGINE, [])  # without blocks, only the sequence number is sent
        for tier, hashes in by_tier.items():
            for start in range(0, max(len(hashes), 1), _HASHES_PER_PART):
                yield GetKvSnapshotResponse(
                    incarnation=incarnation,
                    sequence=sequence,
                    block_hashes=hashes[start : start + _HASHES_PER_PART],
                    tier="" if tier is Tier.ENGINE else tier.value,
                )
