"""Answers the streams of proxies, which ask the endpoint picker for the gateways of requests.

Each stream is about one HTTP request. For a request that generates text, the picker also asks the
master for a plan, which names the instances for the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pdmesh.core.access.process_identity import PROXIES
from pdmesh.core.placement.gateway_ranking import GatewayQuery
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.envoy.v3 import external_processor_pb2 as pb
from pdmesh.errors import DeadlineExceeded, MeshError, NoInstance
from pdmesh.net.grpc.peers import check_role
from pdmesh.services.gateway.access.access_control import AccessControl
from pdmesh.services.gateway.http.errors import OPENAI_ERRORS
from pdmesh.services.gateway.http.exchange import BodyRoom
from pdmesh.services.gateway.http.messages.errors import ANTHROPIC_ERRORS
from pdmesh.services.gateway.picker.answers import Pick, refusal
from pdmesh.services.gateway.picker.dialogue import Head, PickDialogue
from pdmesh.services.gateway.picker.placing import MESSAGES, PlacedRequest, Placing, is_planned
from pdmesh.services.gateway.request.frontend import Frontend, new_request_id
from pdmesh.services.gateway.routing.handed_plans import HandedPlans
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

Context = Any  # grpc.aio.ServicerContext, which is generic in grpc-stubs but not at run time
SERVICE: Final = pb.DESCRIPTOR.services_by_name["ExternalProcessor"]
PROCESS: Final = f"/{SERVICE.full_name}/Process"
_MAX_ENDPOINTS: Final = 4  # of a pick: the first one, and others that the proxy may try next

_picks = metrics.counter(
    names.PICKER_PICKS,
    "Requests for which the endpoint picker named gateways: planned, or without a plan",
)
_refused = metrics.counter(
    names.PICKER_REFUSED, "Requests that the endpoint picker refused, by reason"
)
_duration = metrics.histogram(
    names.PICKER_DURATION, "Time from a request's whole body to the choice of a gateway"
)


@dataclass(frozen=True, slots=True)
class PickerBounds:
    """Limits on a request's body, fields and arrival time, and on who may call."""

    max_body_bytes: int
    receive_timeout_s: float
    is_strict: bool
    is_certified: bool  # with TLS, callers need a certificate of the role `proxy`


class PickerServicer:
    """`room` bounds the bytes of all bodies being read, here and at the HTTP port together."""

    def __init__(
        self,
        frontend: Frontend,
        access: AccessControl,
        plans: HandedPlans,
        room: BodyRoom,
        bounds: PickerBounds,
    ) -> None:
        self._fleet = frontend.shared.fleet
        self._access, self._plans, self._room, self._bounds = access, plans, room, bounds
        self._placing = Placing(frontend, is_strict=bounds.is_strict)
        self._open: Counter[str] = Counter()  # open requests by the gateway's address
        self.num_streams = 0

    async def Process(  # noqa: N802  # Envoy's name
        self, requests: AsyncIterator[pb.ProcessingRequest], context: Context
    ) -> AsyncIterator[pb.ProcessingResponse]:
        if self._bounds.is_certified:
            check_role(PROCESS, context, PROXIES)
        stream = _PickStream(self, requests)
        self.num_streams += 1
        try:
            async for answer in stream.answers():
                yield answer
        finally:
            self.num_streams -= 1
            stream.close()

    def dialogue(self) -> PickDialogue:
        return PickDialogue(is_planned, self._bounds.max_body_bytes, self._room)

    @property
    def receive_timeout_s(self) -> float:
        return self._bounds.receive_timeout_s

    async def tenant(self, head: Head) -> Tenant:
        """Raises MeshError."""
        return await self._access.check(head.authorization)

    async def pick(self, head: Head, body: bytes, tenant: Tenant | None) -> Pick:
        """`tenant` is None for requests that are not planned. Raises MeshError."""
        begun, placement = time.monotonic(), PlacedRequest()
        if tenant is not None:
            self._addresses(placement, head.only)  # raises before the master counts a plan as load
            placement = await self._placing.place(head.path, body, tenant)
        pick = Pick(
            self._addresses(placement, head.only),
            "" if placement.plan is None else self._plans.issue(placement.plan),
        )
        outcome = "unplanned" if placement.plan is None else "planned"
        _picks.add(1, {names.ATTR_OUTCOME: outcome})
        _duration.record(time.monotonic() - begun, {names.ATTR_OUTCOME: outcome})
        return pick

    def _addresses(self, placement: PlacedRequest, only: Collection[str] | None) -> list[str]:
        """Raises NoInstance."""
        query = GatewayQuery(placement.key, placement.region, only)
        found = self._fleet.gateway_endpoints(query, lambda address: self._open[address])
        if found:  # gateways that share a port have one address
            return [*dict.fromkeys(gateway.address for gateway in found)][:_MAX_ENDPOINTS]
        where = "" if only is None else " among the endpoints that the proxy allows"
        raise NoInstance(f"no gateway takes requests{where} now", reason="NO_ENDPOINT")

    def took(self, pick: Pick) -> None:
        self._open[pick.addresses[0]] += 1

    def left(self, pick: Pick) -> None:
        address = pick.addresses[0]
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class _PickStream:
    """The stream for one HTTP request.

    The request counts as open at its gateway until the proxy ends the stream.
    """

    def __init__(
        self, servicer: PickerServicer, requests: AsyncIterator[pb.ProcessingRequest]
    ) -> None:
        self._servicer, self._requests = servicer, requests
        self._dialogue = servicer.dialogue()
        self._tenant: Tenant | None = None
        self._pick: Pick | None = None

    def close(self) -> None:
        self._dialogue.close()
        if self._pick is not None:
            self._servicer.left(self._pick)

    async def answers(self) -> AsyncIterator[pb.ProcessingResponse]:
        try:
            async for answer in self._conversation():
                yield answer
        except MeshError as exc:
            # The frames of the traceback would keep the body in memory.
            yield self._refusal(exc.with_traceback(None))
        except Exception:
            log.exception("picker.bug")
            yield self._refusal(MeshError("internal error; the server's log has the cause"))

    async def _conversation(self) -> AsyncIterator[pb.ProcessingResponse]:
        dialogue = self._dialogue
        until = asyncio.get_running_loop().time() + self._servicer.receive_timeout_s
        while (message := await self._next(None if dialogue.has_picked else until)) is not None:
            answers = dialogue.hear(message)
            if self._tenant is None and dialogue.is_planned and dialogue.head is not None:
                self._tenant = await self._servicer.tenant(dialogue.head)
            for answer in answers:
                yield answer
            if dialogue.wants_pick and dialogue.head is not None:
                pick = await self._servicer.pick(dialogue.head, dialogue.body, self._tenant)
                self._pick = pick
                self._servicer.took(pick)
                for answer in dialogue.picked(pick):
                    yield answer

    async def _next(self, until: float | None) -> pb.ProcessingRequest | None:
        """The next message, or None if the proxy has ended the stream. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(until):
                return await anext(self._requests, None)
        except TimeoutError as exc:
            raise DeadlineExceeded("the request did not arrive completely in time") from exc

    def _refusal(self, error: MeshError) -> pb.ProcessingResponse:
        head = self._dialogue.head
        is_messages = head is not None and head.path.startswith(MESSAGES)
        form = ANTHROPIC_ERRORS if is_messages else OPENAI_ERRORS
        request_id = new_request_id()
        _refused.add(1, {names.ATTR_REASON: error.reason})
        log.info("picker.refused", reason=error.reason, request_id=request_id)
        return refusal(error, form, request_id)
