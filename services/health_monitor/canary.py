"""Tries idle instances with a request of its own, as a gateway would send it, and tells the fault judge what came of it.

It speaks to the instances directly: no gateway counts it, no tenant pays for it, its prefix is nobody's. One probe is under way at a
time, of a few tokens, with a deadline; a refusal is an answer, and says nothing against anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import structlog

from pdmesh.core.block_hash import tokens_to_bytes
from pdmesh.core.canary import CanaryRota, Probe, Subject
from pdmesh.core.fleet import Role
from pdmesh.net import rpc
from pdmesh.net.registry import RegistryView
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    INSTANCE_PHASE_UNSPECIFIED,
    ROLE_DECODE,
    ROLE_FUSION,
    ROLE_PREFILL,
    InstanceRecord,
    SamplingParams,
)
from pdmesh.v1.instance_service_pb2 import (
    Command,
    FirstToken,
    Hello,
    Prefill,
    SessionEvent,
    SessionRequest,
    Start,
)
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from services.health_monitor.faults import FaultWatch

log = structlog.get_logger(__name__)

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs
_PROMPT: Final = tokens_to_bytes(range(5, 13))
_NUM_TOKENS: Final = 2
_TICK_S: Final = 1.0
_SERVES: Final = (INSTANCE_PHASE_UNSPECIFIED, INSTANCE_PHASE_READY)
_ROLES: Final = {
    ROLE_PREFILL: Role.PREFILL,
    ROLE_DECODE: Role.DECODE,
    ROLE_FUSION: Role.FUSION,
}
_probes = metrics.counter(names.CANARY_PROBES, "Canary requests, by outcome")


class Refused(Exception):
    """The instance does not take it now."""


class ProbeFailed(Exception):
    """The instance took it and did not answer it."""


class CanaryRunner:
    """`period_s`: each idle instance is tried so often at most."""

    def __init__(
        self,
        faults: FaultWatch,
        view: RegistryView,
        monitor_id: str,
        *,
        period_s: float,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults, self._view, self._monitor_id = faults, view, monitor_id
        self._timeout_s, self._clock = timeout_s, clock
        self._rota = CanaryRota(period_s)

    async def run(self) -> None:
        """Until cancelled."""
        self._view.on_change(lambda c: None if c.record else self._rota.forget(c.instance_id))
        while True:
            probe = self._rota.next(self._idle(), self._clock())
            if probe is not None:
                await self._try(probe)
            self._tell()
            await asyncio.sleep(_TICK_S)

    def _idle(self) -> list[Subject]:
        records = tuple(self._view.records.values())
        return [s for r in records if self._faults.is_idle(r) and (s := _subject(r)) is not None]

    def _tell(self) -> None:
        """All that is held against anybody, again and again, as others do."""
        for record in tuple(self._view.records.values()):
            subject = _subject(record)
            if subject is not None:
                signals = self._rota.signals(subject)
                self._faults.tell("canary", record, signals, 3 * self._timeout_s)

    async def _try(self, probe: Probe) -> None:
        guilty: list[Subject] = []
        detail = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                guilty = [probe.prefill]  # from here on
                await self._prefill(probe, guilty)
                guilty = []
        except (Refused, KeyError):  # busy, or gone by now
            return
        except (ProbeFailed, grpc.aio.AioRpcError, TimeoutError) as exc:
            detail = str(exc) if isinstance(exc, ProbeFailed) else type(exc).__name__
            log.info("canary.failed", guilty=[s.instance_id for s in guilty], detail=detail)
        _probes.add(1, {names.ATTR_OUTCOME: "failed" if guilty else "passed"})
        self._rota.ended(probe, guilty, detail, self._clock())

    async def _prefill(self, probe: Probe, guilty: list[Subject]) -> None:
        """The whole probe; the prefill's session holds the staged KV until the decode has it."""
        request_id = f"canary-{secrets.token_hex(8)}"
        record = self._view.records[probe.prefill.instance_id]
        command = Prefill(
            key=1,
            request_id=request_id,
            prompt_token_ids=_PROMPT,
            sampling=_sampling(_NUM_TOKENS),
            remaining_ms=int(1000 * self._timeout_s),
            is_local=probe.decode is None,
            cache_salt=secrets.token_hex(32),
        )
        async with _leg(record, self._monitor_id, Command(prefill=command)) as leg:
            first = (await leg.until("first_token")).first_token
            if probe.decode is None:
                await leg.until("finished")
            elif first.HasField("ticket"):
                guilty.append(probe.decode)
                await self._decode(probe.decode, command, first)

    async def _decode(self, decode: Subject, asked: Prefill, first: FirstToken) -> None:
        command = Start(
            key=1,
            request_id=asked.request_id,
            prompt_token_ids=_PROMPT,
            first_token_id=first.token_id,
            ticket=first.ticket,
            sampling=_sampling(_NUM_TOKENS - 1),
            remaining_ms=asked.remaining_ms,
            cache_salt=asked.cache_salt,
        )
        record = self._view.records[decode.instance_id]
        async with _leg(record, self._monitor_id, Command(start=command)) as leg:
            await leg.until("finished")


class _Leg:
    """One leg in a session of its own, which ends with it: whatever it held is given back."""

    def __init__(self, call: Any) -> None:  # grpc-stubs cannot type it
        self._call, self._events = call, deque[SessionEvent]()

    async def until(self, kind: str) -> SessionEvent:
        """Raises Refused, ProbeFailed, and what gRPC raises when the instance goes away."""
        while True:
            while self._events:
                event = self._events.popleft()
                match event.WhichOneof("event"):
                    case found if found == kind:
                        return event
                    case "rejected":
                        raise Refused
                    case "failed":
                        raise ProbeFailed(event.failed.reason)
            response = await self._call.read()
            if response is _EOF:
                raise ProbeFailed("the session ended")
            self._events.extend(response.events)


@contextlib.asynccontextmanager
async def _leg(record: InstanceRecord, monitor_id: str, command: Command) -> AsyncIterator[_Leg]:
    hello = Hello(
        gateway_id=monitor_id, instance_id=record.instance_id, incarnation=record.incarnation
    )
    async with rpc.channel(record.grpc_address) as channel:
        stub: Any = InstanceServiceStub(
            channel
        )  # the stubs only know a call that takes an iterator
        call = stub.Session()
        try:
            await call.write(SessionRequest(commands=[Command(hello=hello), command]))
            yield _Leg(call)
        finally:
            call.cancel()


def _subject(record: InstanceRecord) -> Subject | None:
    """None if it is no instance that serves."""
    role = _ROLES.get(record.role)
    if role is None or record.is_draining or record.phase not in _SERVES:
        return None
    cell = f"{record.group_id}/{record.model_fingerprint}/{record.revision}/{record.kv_region}"
    return Subject(record.instance_id, record.incarnation, role, cell)


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, top_p=1.0, ignore_eos=True)
