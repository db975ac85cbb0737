"""Connects the sessions of gateways with the engine of an instance.

A session is the gRPC stream of one gateway. The gateway's commands begin and end legs. A leg is a
request's stay on this instance. The host applies commands at once and in order, on the event loop.
When a session ends, for whatever reason, all its legs end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from pdmesh.core.deadlines import OUTBOX_STALL_S, PROGRESS_EVERY_S
from pdmesh.core.health.outlier_detection import Vitals
from pdmesh.core.instance.admission import Admission
from pdmesh.core.instance.prompt_times import LoadBook
from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource, KvSource, SourceFault
from pdmesh.core.model import PeerId
from pdmesh.engine.base import BlocksChanged, Engine, Failed, Prefetch
from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs import convert, instruments
from pdmesh.instance.legs.kv_source_reports import KvSourceReports, OnError
from pdmesh.instance.legs.leg_life import LegLife, PullLimits
from pdmesh.instance.legs.legs import Leg
from pdmesh.instance.legs.outbox import Outbox
from pdmesh.instance.legs.outputs import Outputs
from pdmesh.v1.instance_service_pb2 import Command, Load, Progress

log = structlog.get_logger(__name__)

ENGINE_DIED: Final = "ENGINE_DIED"


@dataclass(frozen=True, slots=True)
class HostConfig:
    pulls: PullLimits = field(default_factory=PullLimits)
    stall_s: float = OUTBOX_STALL_S  # a gateway that does not read for this time is cut off
    message_gap_s: float = 0.002  # least time between a message and the next tokens
    progress_every_s: float = PROGRESS_EVERY_S


@dataclass(frozen=True, slots=True)
class HostReports:
    """Callbacks for changes that other processes must see. Callbacks must not block.

    `on_record` is called when the instance's registry record has changed.
    """

    on_blocks: Callable[[BlocksChanged], None] = lambda _: None
    on_error: OnError = lambda reason, message, request_id: None
    on_record: Callable[[], None] = lambda: None


class Speculated(NamedTuple):
    """The engine's proposals of tokens since its start. Without speculation, all counts are 0."""

    num_proposals: int
    num_accepted: int  # tokens
    num_rejected: int


class InstanceHost:
    """The legs of one engine, for all gateways. Everything runs on one event loop.

    `on_load` is called when the load changed, and must not block. `new_secret` makes the part of a
    ticket's id that cannot be guessed. A ticket is a decode's right to pull one prompt's KV.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        clock: Callable[[], float],
        config: HostConfig = HostConfig(),
        reports: HostReports = HostReports(),
        new_secret: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.admission = admission
        self.on_load: Callable[[], None] = lambda: None
        self.engine, self._clock, self._config = engine, clock, config
        self._sources = KvSourceReports(clock, reports.on_error, reports.on_record)
        self._life = LegLife(engine, admission, clock, config.pulls, self._sources, new_secret)
        self._life.on_late = self._after_changes
        self._outputs = Outputs(self._life, clock, reports.on_blocks, reports.on_record)
        self._idle = asyncio.Event()
        self._idle.set()
        self._outboxes: dict[Outbox, None] = {}
        self._published_version = -1
        self._num_signs_told = 0
        self._has_ignored = False  # whether an unknown command has come

    # -- state ------------------------------------------------------------------------------------

    @property
    def book(self) -> LoadBook:
        return self._life.book

    @property
    def vitals(self) -> Vitals:
        return self._life.vitals

    @property
    def num_sessions(self) -> int:
        return len(self._outboxes)

    @property
    def num_running(self) -> int:
        """The number of legs that compute or wait for their KV."""
        return self.engine.stats().num_running

    @property
    def num_pulls_queued(self) -> int:
        return int(self.engine.stats().extra.get("num_pulls_queued", 0))

    @property
    def num_engine_blocks_free(self) -> int:
        return self.engine.stats().num_kv_blocks_free

    @property
    def num_kv_connections(self) -> int:
        return int(self.engine.stats().extra.get("num_kv_connections", 0))

    @property
    def speculated(self) -> Speculated:
        counted = self.engine.stats().extra
        proposed = int(counted.get("num_proposed_tokens", 0))
        accepted = int(counted.get("num_accepted_tokens", 0))
        return Speculated(int(counted.get("num_proposals", 0)), accepted, proposed - accepted)

    @property
    def engine_numbers(self) -> Mapping[str, float]:
        """Counters that only this kind of engine has, by name."""
        return self.engine.stats().extra

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """The digests of the adapters in the engine's slots."""
        return self._outputs.loaded_adapters

    @property
    def avoided_encoders(self) -> tuple[PeerId, ...]:
        return self.engine.stats().avoided_encoders

    @property
    def num_tickets(self) -> int:
        return self._life.table.num_tickets

    def load(self) -> Load:
        admission = self.admission
        return Load(
            num_slots=admission.num_places,
            num_slots_used=admission.num_slots_used,
            num_kv_blocks_free=admission.num_blocks_free,
            is_draining=admission.is_draining,
        )

    @property
    def _is_full(self) -> bool:
        return self.admission.num_slots_used >= self.admission.num_places

    def progress(self) -> Progress:
        stats = self.engine.stats()
        return Progress(
            num_signs=stats.num_signs,
            num_tokens=stats.num_tokens,
            num_open_tokens=self._life.table.num_open_tokens,
        )

    def excluded_sources(self) -> list[ExcludedSource]:
        return self._sources.excluded()

    def num_sources_excluded(self, fault: SourceFault) -> int:
        return self._sources.num_excluded(fault)

    async def wait_idle(self) -> None:
        """Wait until no leg holds a slot or KV, including KV that waits for a decode's pull."""
        await self._idle.wait()

    def check_invariants(self) -> None:
        self._life.check_invariants()
        assert all(leg.outbox in self._outboxes for leg in self._life.table.all())

    # -- sessions ---------------------------------------------------------------------------------

    def open(self, gateway_id: str) -> Outbox:
        config = self._config
        outbox = Outbox(gateway_id, config.stall_s, self._clock, config.message_gap_s)
        self._outboxes[outbox] = None
        outbox.set_load(self.load(), self.admission.version)
        outbox.wants_load = self._is_full
        outbox.set_progress(self.progress())
        return outbox

    def close(self, outbox: Outbox) -> None:
        """Abort every leg of the session; idempotent."""
        if outbox not in self._outboxes:
            return
        outbox.close()
        for leg in self._life.table.of_session(outbox):
            self._life.abort(leg)
        del self._outboxes[outbox]
        self._after_changes()

    def close_all(self) -> None:
        for outbox in list(self._outboxes):
            self.close(outbox)

    def apply(self, outbox: Outbox, commands: Iterable[Command]) -> None:
        """Carry out a batch of commands.

        Commands that only a later release knows are ignored. The session stays open, because its
        end would end all other legs of the gateway. If an ignored command was to begin a leg, the
        gateway gets no acceptance and gives the leg up after `ANSWER_S`.

        Raises InvalidRequest for commands that no correct gateway sends.
        """
        life = self._life
        for command in commands:
            match command.WhichOneof("command"):
                case "prefill" | "start" | "pool" | "encode" as kind:
                    life.begin(outbox, getattr(command, kind))
                case "join" | "embedded" | "abort" | "release" as kind:
                    if leg := life.table.find(outbox, getattr(command, kind).key):
                        self._tell(leg, command, kind)
                case "prefetch":
                    self._prefetch(convert.prefetch_from_proto(command.prefetch))
                case "session_hint":
                    self.engine.note_session(convert.session_hint_from_proto(command.session_hint))
                case None:
                    self._ignore(outbox)
                case kind:
                    raise InvalidRequest(f"{kind} cannot come here", field="commands")
        self._after_changes()

    def _prefetch(self, wanted: Prefetch) -> None:
        source = KvSource(wanted.peer.instance_id, wanted.peer.incarnation)
        if not self._sources.ejects(source):
            self.engine.prefetch(wanted)

    def _ignore(self, outbox: Outbox) -> None:
        instruments.unknown_commands.add(1)
        if not self._has_ignored:
            self._has_ignored = True
            log.warning("session.unknown_command", gateway_id=outbox.gateway_id)

    def _tell(self, leg: Leg, command: Command, kind: str) -> None:
        match kind:
            case "join":
                self._life.join(leg, command.join.first_token_id)
            case "embedded":
                self._life.embedded(leg, command.embedded)
            case "abort":
                self._life.abort(leg)
            case "release":
                self.engine.release(leg.ticket_id)

    def drain(self, is_draining: bool) -> None:
        self.admission.drain(is_draining)
        for outbox in self._outboxes:
            outbox.wants_load = True
        self._after_changes()

    # -- the engine -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pass the engine's outputs on until the engine dies.

        Then fail all legs and raise EngineFailed.
        """
        pass_on = self._outputs.pass_on
        try:
            async for outputs in self.engine.outputs():
                for output in outputs:
                    pass_on(output)
                self._after_changes()
        except Exception:
            self.fail_all(ENGINE_DIED, "the engine died")
            raise

    async def tell_progress(self) -> None:
        """Report the engine's progress periodically to the sessions that have legs.

        The engine may work for a long time before its first output. Gateways must not mistake this
        for a hang.
        """
        while True:
            await asyncio.sleep(self._config.progress_every_s)
            progress = self.progress()
            if progress.num_signs == self._num_signs_told:
                continue
            self._num_signs_told = progress.num_signs
            for outbox in list(self._outboxes):
                if self._life.table.has_any(outbox):
                    outbox.set_progress(progress)
                    outbox.flush()

    def fail_all(self, reason: str, message: str) -> None:
        """The instance must end: fail every leg, end all sessions, and accept no new leg."""
        self._sources.on_error(reason, message, "")
        for leg in self._life.table.all():
            failure = Failed(leg.number, reason, message)
            leg.outbox.add_event(convert.failed(leg.key, failure))
            self._life.forget(leg, "failed")
        self.admission.drain(True)
        for outbox in self._outboxes:
            outbox.flush()
            outbox.close()

    def _after_changes(self) -> None:
        """Let sessions send their waiting output, and report the load if it changed.

        Gateways that wait for a free slot get the load as soon as there is one.
        """
        admission = self.admission
        version, is_full = admission.version, self._is_full
        for outbox in self._outboxes:
            is_hint = outbox.wants_load and not is_full
            if not (outbox.has_something or is_hint):
                continue
            if outbox.load_version != version:
                outbox.set_load(self.load(), version, is_urgent=is_hint)
                outbox.wants_load = is_full
            outbox.flush()
        if version != self._published_version:
            self._published_version = version
            if admission.num_slots_used == 0:
                self._idle.set()
            else:
                self._idle.clear()
            self.on_load()
