"""Registers LoRA adapters at the leading master, after instances have inspected the adapters.

The registered adapters are stored on a board, a key-value bucket in NATS. Gateways and instances
read this board directly, so an adapter does not depend on any master. After an adapter is removed,
gateways refuse requests for it, and instances unload it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import grpc
import structlog

from pdmesh.core.adapters.adapter import check_name, check_path
from pdmesh.core.placement.plan import DEFAULT_MODEL
from pdmesh.errors import (
    AdapterUnusable,
    InvalidRequest,
    MeshError,
    ModelNotFound,
    NotLeader,
    Unavailable,
    shortened,
)
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.net.registry import RegistryView, takes_requests
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import InspectAdapterRequest, InspectAdapterResponse
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub

log = structlog.get_logger(__name__)

MAX_ADAPTERS: Final = 1000  # bounded because each adapter becomes a label of metrics
_TICK_S: Final = 1.0
_INSPECT_S: Final = 60.0  # an adapter's files may be large, and their storage slow
_MAX_ASKED: Final = 8  # how many instances inspect the files of a new adapter


class Adapters:
    """Keeps the registered adapters at every master. Only the leader changes them.

    `leadership` returns whether this process leads now, and its epoch.
    """

    def __init__(
        self,
        board: Board[pb.RegisteredAdapter],
        view: RegistryView,
        leadership: Callable[[], tuple[bool, int]],
    ) -> None:
        self._board, self._registry, self._leadership = board, view, leadership
        self._adapters: BoardView[pb.RegisteredAdapter] | None = None

    @property
    def known(self) -> Mapping[str, pb.RegisteredAdapter]:
        """The registered adapters, by name."""
        return self._adapters.known if self._adapters is not None else {}

    async def run(self) -> None:
        """Runs until cancelled."""
        self._adapters = self._board.watch(lambda _: None)
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                try:
                    await self.round()
                except MeshError as exc:
                    log.info("adapters.not_now", reason=exc.reason, error=exc.message)
                except Exception:  # a bug here must not end the planning of requests
                    log.exception("adapters.bug")
        finally:
            await self._adapters.close()

    async def round(self) -> None:
        """If this master leads, rewrite adapters that the bucket has lost (F21).

        Raises MeshError.
        """
        is_leader, epoch = self._leadership()
        if not is_leader or self._adapters is None or not self._adapters.is_current:
            return
        for name in sorted(self._adapters.missing):
            await self._write(self._adapters.known[name], epoch)
            log.warning("adapters.restored", adapter=name)

    async def add(self, request: pb.AddAdapterRequest, epoch: int) -> pb.AddAdapterResponse:
        """Register an adapter, or replace the adapter of this name.

        Raises MeshError. After Unavailable, the adapter may have been registered, and the call may
        be repeated. After any other error, nothing has changed.
        """
        adapters = self._opened()
        check_name(request.name)
        if request.name == DEFAULT_MODEL:  # in a request, this name means any served model
            message = f"{request.name} means whichever model serves: no adapter has this name"
            raise InvalidRequest(message, field="name")
        check_path(request.path)
        records = self._able(request.model)
        if request.name in {r.model for r in self._registry.records.values()}:
            raise InvalidRequest(f"{request.name} is already the name of a model", field="name")
        if request.name not in adapters.known and len(adapters.known) >= MAX_ADAPTERS:
            raise InvalidRequest(f"there are {MAX_ADAPTERS} adapters already", field="name")
        found = await self._inspected(records[:_MAX_ASKED], request.path)
        entry = pb.RegisteredAdapter(
            name=request.name,
            model=records[0].model,
            path=request.path,
            digest=found.digest,
            rank=found.rank,
            num_bytes=found.num_bytes,
        )
        entry.since.GetCurrentTime()
        await self._write(entry, epoch)
        log.info("adapters.added", adapter=entry.name, model=entry.model, digest=entry.digest)
        asked = [r.instance_id for r in records[:_MAX_ASKED]]
        return pb.AddAdapterResponse(adapter=entry, instance_ids=asked)

    async def remove(self, name: str, epoch: int) -> None:
        """Remove an adapter.

        Raises InvalidRequest if there is no adapter of this name. Also raises Unavailable,
        NotLeader or VersionConflict.
        """
        adapters = self._opened()
        if name not in adapters.known:
            raise InvalidRequest(f"there is no adapter {shortened(name)}", field="name")
        self._check_leadership(epoch)
        revision = await self._board.forget(name, last=adapters.revision(name))
        adapters.wrote(name, None, revision)
        log.info("adapters.removed", adapter=name)

    def states(self) -> list[pb.AdapterState]:
        """The adapters by name, with the instances that have loaded each.

        Raises Unavailable while the list of adapters cannot be read or may be outdated.
        """
        known, records = self._opened().known, self._registry.records
        return [
            pb.AdapterState(
                adapter=known[name],
                instance_ids=sorted(
                    i for i, r in records.items() if known[name].digest in r.loaded_adapters
                ),
            )
            for name in sorted(known)
        ]

    # -- instances --------------------------------------------------------------------------------

    def _able(self, model: str) -> Sequence[InstanceRecord]:
        """The instances of the model that take adapters.

        One instance of each group and role comes first, because only the first `_MAX_ASKED` inspect
        a new adapter. Raises InvalidRequest or ModelNotFound if there is none.
        """
        serving = [r for _, r in sorted(self._registry.records.items()) if takes_requests(r)]
        models = sorted({r.model for r in serving if r.model})
        if not model and len(models) > 1:
            raise InvalidRequest(f"choose a model: {', '.join(models)}", field="model")
        model = model or (models[0] if models else "")
        if model not in models:
            raise ModelNotFound(f"no instance has {shortened(model) or 'a model'}", field="model")
        able = [r for r in serving if r.model == model and r.max_adapters]
        if not able:
            raise InvalidRequest(
                f"no instance of {model} takes adapters: set ENABLE_LORA", field="model"
            )
        firsts = {(r.group_id, r.role): r for r in reversed(able)}.values()
        chosen = {r.instance_id for r in firsts}
        return sorted(able, key=lambda r: (r.instance_id not in chosen, r.instance_id))

    async def _inspected(
        self, records: Sequence[InstanceRecord], path: str
    ) -> InspectAdapterResponse:
        """Let the instances inspect the adapter's folder.

        Raises InvalidRequest if an instance cannot load the adapter, or if the instances see
        different files. Raises Unavailable if an instance does not answer or fails in another way.
        """
        found = await asyncio.gather(*(_inspect(record, path) for record in records))
        if len({each.digest for each in found}) > 1:
            names = ", ".join(r.instance_id for r in records)
            raise InvalidRequest(f"the instances see different files there: {names}", field="path")
        return found[0]

    # -- writing ----------------------------------------------------------------------------------

    async def _write(self, entry: pb.RegisteredAdapter, epoch: int) -> None:
        adapters = self._opened()
        self._check_leadership(epoch)
        last = adapters.revision(entry.name)
        revision = await self._board.write(entry.name, entry, last=last)
        adapters.wrote(entry.name, entry, revision)

    def _opened(self) -> BoardView[pb.RegisteredAdapter]:
        if self._adapters is None or not self._adapters.is_current:
            raise Unavailable("the adapters are not known now: NATS is away, or has just come back")
        return self._adapters

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader("this master has just lost the lead; nothing was changed")


async def _inspect(record: InstanceRecord, path: str) -> InspectAdapterResponse:
    channel = rpc.channel_to(record)
    try:
        stub = InstanceServiceStub(channel)
        return await stub.InspectAdapter(InspectAdapterRequest(path=path), timeout=_INSPECT_S)
    except grpc.aio.AioRpcError as exc:
        error = rpc.from_rpc_error(exc)
        if isinstance(error, AdapterUnusable | InvalidRequest):
            message = f"{record.instance_id} cannot load it: {error.message}"
            raise InvalidRequest(message, field="path") from exc
        raise Unavailable(f"{record.instance_id}: {error.message}") from exc
    finally:
        await channel.close(None)
