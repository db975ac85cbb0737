"""All calls of the gRPC service AdminService, as typed methods.

A refused call raises a MeshError: InvalidRequest for a bad value, NotAllowed if the caller may not
make the call, Unavailable if no master leads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from pdmesh.net.grpc.admin_client import Invoke, Metadata, T
from pdmesh.v1 import admin_service_pb2 as pb
from pdmesh.v1 import overview_pb2 as looks

if TYPE_CHECKING:
    from grpc.aio import UnaryUnaryMultiCallable

    from pdmesh.v1.admin_service_pb2_grpc import AdminServiceAsyncStub

_ADAPTER_S: Final = 90.0  # longest time for adding an adapter, whose files an instance reads

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class AskLeader(Protocol):
    """Makes one call at the leading master."""

    def __call__(self, invoke: Invoke[T], /) -> Awaitable[T]: ...


class AdminCalls:
    def __init__(self, ask: AskLeader) -> None:
        self._ask = ask

    # The desired state.

    async def desired(self, version: int = 0) -> pb.DesiredVersion | None:
        """One version of the desired state, by default the current one.

        Returns None if no desired state was ever applied.
        """
        request = pb.GetDesiredRequest(version=version)
        answer = await self._call(lambda stub: stub.GetDesired, request)
        return answer.desired if answer.HasField("desired") else None

    async def history(self, limit: int = 0) -> pb.ListDesiredVersionsResponse:
        """The stored versions without their texts, the current one first.

        Returns at most `limit` versions, or all of them if `limit` is 0.
        """
        request = pb.ListDesiredVersionsRequest(limit=limit)
        return await self._call(lambda stub: stub.ListDesiredVersions, request)

    async def diff(self, text: str) -> pb.DiffDesiredResponse:
        """Show what `apply` would change, but change nothing."""
        return await self._call(lambda stub: stub.DiffDesired, pb.DiffDesiredRequest(text=text))

    async def apply(
        self,
        text: str,
        *,
        author: str,
        reason: str = "",
        expected_version: int | None = None,
        allow_empty: bool = False,
        canary_share: float = 0.0,
    ) -> pb.ApplyDesiredResponse:
        """Make the text the desired state.

        Raises VersionConflict if `expected_version` is given and is not the current version.
        """
        request = pb.ApplyDesiredRequest(
            text=text,
            author=author,
            reason=reason,
            expected_version=expected_version,
            allow_empty=allow_empty,
            canary_share=canary_share,
        )
        return await self._call(lambda stub: stub.ApplyDesired, request)

    async def rollback(
        self, version: int = 0, *, author: str, reason: str = "", allow_empty: bool = False
    ) -> pb.RollbackDesiredResponse:
        """Make an earlier version the desired state again. 0 means the previous version."""
        request = pb.RollbackDesiredRequest(
            version=version, author=author, reason=reason, allow_empty=allow_empty
        )
        return await self._call(lambda stub: stub.RollbackDesired, request)

    async def promote(self, scenario: str = "") -> pb.PromoteUpgradeResponse:
        """Give the canary's revision to all groups of `scenario`.

        A canary is a group that got a new revision first. If `scenario` is empty, this promotes the
        canaries of all scenarios.
        """
        request = pb.PromoteUpgradeRequest(scenario=scenario)
        return await self._call(lambda stub: stub.PromoteUpgrade, request)

    # Groups and instances.

    async def groups(self) -> pb.ListGroupStatesResponse:
        return await self._call(lambda stub: stub.ListGroupStates, pb.ListGroupStatesRequest())

    async def usage(self) -> pb.GetUsageResponse:
        return await self._call(lambda stub: stub.GetUsage, pb.GetUsageRequest())

    async def overview(self) -> looks.GetOverviewResponse:
        """The present state of the mesh, as the operators' page shows it."""
        return await self._call(lambda stub: stub.GetOverview, looks.GetOverviewRequest())

    async def answers(self) -> looks.GetHistoryResponse:
        """The times to first token and the counts of answers in the last hour, by scenario."""
        return await self._call(lambda stub: stub.GetHistory, looks.GetHistoryRequest())

    async def request_story(self, request_id: str) -> looks.GetRequestStoryResponse:
        """The steps of one request. Raises InvalidRequest if the master has no record of it."""
        request = looks.GetRequestStoryRequest(request_id=request_id)
        return await self._call(lambda stub: stub.GetRequestStory, request)

    async def plan_moves(self, request: pb.PlanMovesRequest) -> pb.PlanMovesResponse:
        return await self._call(lambda stub: stub.PlanMoves, request)

    async def cordon(
        self, instance_id: str, *, reason: str = "", at_once: bool = True
    ) -> pb.CordonInstanceResponse:
        """Take an instance out of service.

        With `at_once`, the instance's requests move to other instances. Without, the instance
        finishes its requests first.
        """
        mode = pb.LEAVE_MODE_AT_ONCE if at_once else pb.LEAVE_MODE_DRAIN
        request = pb.CordonInstanceRequest(instance_id=instance_id, mode=mode, reason=reason)
        return await self._call(lambda stub: stub.CordonInstance, request)

    async def uncordon(self, instance_id: str) -> pb.UncordonInstanceResponse:
        request = pb.UncordonInstanceRequest(instance_id=instance_id)
        return await self._call(lambda stub: stub.UncordonInstance, request)

    # Pinned prefixes and LoRA adapters.

    async def add_pin(self, request: pb.AddPinRequest) -> pb.AddPinResponse:
        return await self._call(lambda stub: stub.AddPin, request)

    async def pins(self) -> pb.ListPinsResponse:
        return await self._call(lambda stub: stub.ListPins, pb.ListPinsRequest())

    async def remove_pin(self, pin_id: str) -> pb.RemovePinResponse:
        return await self._call(lambda stub: stub.RemovePin, pb.RemovePinRequest(pin_id=pin_id))

    async def add_adapter(self, name: str, path: str, model: str = "") -> pb.AddAdapterResponse:
        """Register a LoRA adapter.

        `path` is an absolute path that instances can read. `model` is the base model's name for
        clients. It may be empty if the mesh has only one model.
        """
        request = pb.AddAdapterRequest(name=name, model=model, path=path)
        return await self._call(lambda stub: stub.AddAdapter, request, _ADAPTER_S)

    async def adapters(self) -> pb.ListAdaptersResponse:
        return await self._call(lambda stub: stub.ListAdapters, pb.ListAdaptersRequest())

    async def remove_adapter(self, name: str) -> pb.RemoveAdapterResponse:
        request = pb.RemoveAdapterRequest(name=name)
        return await self._call(lambda stub: stub.RemoveAdapter, request)

    async def _call(
        self,
        method: Callable[[AdminServiceAsyncStub], UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout_s: float | None = None,
    ) -> Answer:
        async def invoke(stub: AdminServiceAsyncStub, metadata: Metadata, usual_s: float) -> Answer:
            return await method(stub)(request, metadata=metadata, timeout=timeout_s or usual_s)

        return await self._ask(invoke)
