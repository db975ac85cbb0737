"""What a gateway would pay to hold the master's view of the mesh.

The gateway would have to decode and apply every event of the mesh. The events come from a mesh of
750 prefills and 500 decodes on the virtual clock, as its instances would publish them at
`REQUESTS_PER_S`. They are replayed into an empty view. The bus costs as much again or more, which
is not counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from loadtests.placement.plan import NUM_BLOCKS
from loadtests.placement.scale.decisions import RTP
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.core.kv.prefix.prefix_index import DeltaOutcome, IndexDelta, PrefixIndex
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Event, Fleet, InstanceRecorded, LoadReported
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import MOCKER
from pdmesh.events.v1.events_pb2 import InstanceLoad, KvBlocks
from pdmesh.net.bus import Message
from pdmesh.net.events import BINARY, CONTENT_TYPE, decode_event
from pdmesh.service_process import calm_the_collector
from pdmesh.services.master_scheduler.placement.fleet_feed import load_from

REQUESTS_PER_S: Final = 1000.0
_NUM_PREFIXES: Final = 64
_OUTPUT: Final = 256
_CACHE: Final = 256  # blocks of a prefill's cache


class Tape:
    """The instances' events in order, as messages."""

    def __init__(self) -> None:
        self.identities: list[InstanceRecorded] = []
        self.loads: list[Message] = []
        self.blocks: list[Message] = []
        self.num_blocks = 0
        self._sequences: dict[str, int] = {}

    def load(self, told: LoadReported) -> None:
        message = InstanceLoad(
            num_slots=told.num_slots,
            num_slots_used=told.num_slots_used,
            num_kv_blocks_free=told.num_kv_blocks_free,
            is_draining=told.is_draining,
            admitted_request_ids=told.admitted,
            computed=[
                InstanceLoad.Computed(
                    request_id=c.request_id,
                    num_tokens=c.num_tokens,
                    num_cached_tokens=c.num_cached_tokens,
                    seconds=c.seconds,
                    num_steps=c.num_steps,
                    num_beside=c.num_beside,
                )
                for c in told.computed
            ],
        )
        number = self._sequences[told.instance_id] = self._sequences.get(told.instance_id, 0) + 1
        self.loads.append(_packed(message, told.instance_id, number))

    def delta(self, delta: IndexDelta) -> None:
        self.num_blocks += len(delta.stored) + len(delta.removed)
        message = KvBlocks(stored=delta.stored, removed=delta.removed)
        self.blocks.append(_packed(message, delta.instance_id, delta.sequence))


class TapedFleet(Fleet):
    """A fleet that also records its events on a tape."""

    tape: Tape

    def handle(self, event: Event, now: float) -> None:
        if isinstance(event, LoadReported):
            self.tape.load(event)
        elif isinstance(event, InstanceRecorded):
            self.tape.identities.append(event)
        Fleet.handle(self, event, now)


class TapedIndex(PrefixIndex):
    """An index that also records its events on a tape."""

    tape: Tape

    def apply(self, delta: IndexDelta) -> DeltaOutcome:
        self.tape.delta(delta)
        return PrefixIndex.apply(self, delta)


class TapedMesh(VirtualMesh):
    """A mesh that records its events.

    Two prompts fill a prefill's cache. So each further prompt removes as many blocks as it stores.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__(MeshShape(MOCKER, num_blocks=_CACHE), "default", 1, Weights())
        self.fleet, self.index = TapedFleet(), TapedIndex()
        self.fleet.tape = self.index.tape = tape
        self.placement.fleet = self.fleet
        num_prefills = round(0.6 * RTP)
        for number in range(RTP):
            role = Role.PREFILL if number < num_prefills else Role.DECODE
            self.add(f"{role.value}-{number}", role)


def held_by_a_gateway(num_requests: int) -> dict[str, float]:
    """Measure the CPU for the events of one request, and the cores at `REQUESTS_PER_S`."""
    tape = taped(num_requests)
    calm_the_collector()
    fleet, index = Fleet(), PrefixIndex()
    for record in tape.identities:
        fleet.handle(record, 0.0)
    loads_s = _timed(tape.loads, lambda message: _hear_load(fleet, message))
    blocks_s = _timed(tape.blocks, lambda message: _hear_blocks(index, message))
    assert index.num_blocks > 0
    per_request = {
        "load reports": 1e3 * loads_s / num_requests,
        "KV events": 1e3 * blocks_s / num_requests,
    }
    whole = sum(per_request.values())
    where = "the mesh's events at a gateway"
    return {
        f"{where}: load reports of a request": len(tape.loads) / num_requests,
        f"{where}: KV events of a request": len(tape.blocks) / num_requests,
        f"{where}: blocks stored or removed by a request": tape.num_blocks / num_requests,
        **{f"{where}: CPU ms of a request's {what}": ms for what, ms in per_request.items()},
        f"{where}: CPU ms of a request, without the bus": whole,
        f"{where}: cores at {REQUESTS_PER_S:,.0f} requests/s, without the bus": (
            whole * REQUESTS_PER_S / 1e3
        ),
    }


def taped(num_requests: int) -> Tape:
    tape = Tape()
    mesh = TapedMesh(tape)
    mesh.run(list(_arrivals(num_requests)))
    return tape


def _arrivals(num_requests: int) -> Iterator[Arrival]:
    """Requests like those of the decisions. Half of each prompt is a prefix that other prompts
    share.
    """
    rng, now = random.Random(5), 0.0
    for number in range(num_requests):
        now += rng.expovariate(REQUESTS_PER_S)
        prefix, half = rng.randrange(_NUM_PREFIXES), NUM_BLOCKS // 2
        blocks = [block_name(prefix, part) for part in range(half)]
        blocks += [block_name(_NUM_PREFIXES + number, part) for part in range(half)]
        yield Arrival(now, NUM_BLOCKS * 64, _OUTPUT, tuple(blocks))


def _packed(message: Any, instance_id: str, number: int) -> Message:
    message.header.publisher_id, message.header.incarnation = instance_id, 1
    message.header.sequence = number
    return Message("", message.SerializeToString(), {CONTENT_TYPE: BINARY})


def _hear_load(fleet: Fleet, message: Message) -> None:
    fleet.handle(load_from(decode_event(message, InstanceLoad)), 0.0)


def _hear_blocks(index: PrefixIndex, message: Message) -> None:
    told: Any = decode_event(message, KvBlocks)
    header = told.header
    index.apply(
        IndexDelta(
            header.publisher_id,
            header.incarnation,
            header.sequence,
            tuple(told.removed),
            tuple(told.stored),
        )
    )


def _timed(messages: Sequence[Message], hear: Callable[[Message], None]) -> float:
    began = time.thread_time()
    for message in messages:
        hear(message)
    return time.thread_time() - began
