"""A master that decides nothing: a test writes the assignments that a real master would write.

An assignment is a master's order to an instance, such as its role and how far it may go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.instance.incarnation.assignment import ROLES
from pdmesh.net.assignments import AssignmentBook
from pdmesh.net.registry import RegistryView
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_BLANK,
    INSTANCE_PHASE_CONNECTED,
    INSTANCE_PHASE_DRAINED,
    INSTANCE_PHASE_LOADED,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
    Role,
)
from pdmesh.v1.groups_pb2 import (
    STAGE_BLANK,
    STAGE_CONNECT,
    STAGE_DRAIN,
    STAGE_LOAD,
    STAGE_SERVE,
    Assignment,
    Peer,
    Stage,
)
from tests.support.sites.instance_site import Process, Site
from tests.support.waiting import until

OPTIONS = {"sim_law": "zero", "num_slots": "4"}


@dataclass
class Master:
    """Writes assignments, and waits for the records of the instances that carry them out.

    As the real master does, the class writes an assignment's stages one at a time.
    """

    view: RegistryView
    book: AssignmentBook
    epoch: int = 1
    options: Mapping[str, str] = field(default_factory=lambda: OPTIONS)
    wait_s: float = 30.0
    # The manifests of model files, by role.
    manifests: Mapping[str, Path] = field(default_factory=dict)
    given: dict[str, Assignment] = field(default_factory=dict)

    def record(self, name: str) -> InstanceRecord:
        return self.view.records.get(name, InstanceRecord())

    async def until(self, name: str, phase: int) -> InstanceRecord:
        await until(lambda: self.record(name).phase == phase, self.wait_s)
        return self.record(name)

    async def assign(self, name: str, role: Role.ValueType, **changes: object) -> Assignment:
        """Assign a role to the current incarnation of an instance, which then loads the model."""
        values: dict[str, object] = {
            "instance_id": name,
            "incarnation": self.record(name).incarnation,
            "epoch": self.epoch,
            "assignment_id": 1,
            "stage": STAGE_LOAD,
            "role": role,
            "group_id": "g0",
            "scenario": "default",
            "revision": "r1",
            "model": "tiny",
            "engine_options": self.options,
            "manifest": str(self.manifests.get(ROLES[role].value, "")),
        }
        assignment = Assignment(**(values | changes))  # type: ignore[arg-type]
        self.given[name] = assignment
        await self.book.write(assignment)
        return assignment

    async def stage(
        self, name: str, stage: Stage.ValueType, peers: list[Peer] | None = None
    ) -> None:
        assignment = self.given[name]
        assignment.stage = stage
        if peers is not None:
            del assignment.peers[:]
            assignment.peers.extend(peers)
        await self.book.write(assignment)

    def peer(self, name: str, **changes: object) -> Peer:
        record = self.record(name)
        values = {"incarnation": record.incarnation, "kv_addresses": record.kv_addresses}
        return Peer(instance_id=name, role=record.role, **(values | changes))  # type: ignore[arg-type]

    async def set_up(self, prefill: str, decode: str) -> None:
        """Bring a group of one prefill and one decode to READY.

        The prefill becomes ready last, because requests enter there (S19).
        """
        await self.assign(prefill, ROLE_PREFILL)
        await self.assign(decode, ROLE_DECODE)
        for name in (prefill, decode):
            await self.until(name, INSTANCE_PHASE_LOADED)
        await self.stage(prefill, STAGE_CONNECT, [self.peer(decode)])
        await self.stage(decode, STAGE_CONNECT, [self.peer(prefill)])
        for name in (decode, prefill):
            await self.until(name, INSTANCE_PHASE_CONNECTED)
            await self.stage(name, STAGE_SERVE)
            await self.until(name, INSTANCE_PHASE_READY)

    async def erase(self, name: str) -> None:
        """Drain an instance, make it blank, and wait for the next incarnation."""
        await self.stage(name, STAGE_DRAIN)
        await self.until(name, INSTANCE_PHASE_DRAINED)
        await self.begin_anew(name)

    async def begin_anew(self, name: str) -> None:
        """Make an instance blank without a drain, and wait for the next incarnation."""
        before = self.record(name).incarnation
        await self.stage(name, STAGE_BLANK)
        await until(lambda: self.record(name).incarnation not in (0, before), self.wait_s)
        assert self.record(name).phase == INSTANCE_PHASE_BLANK


async def blank(site: Site, name: str, **env: str) -> Process:
    process = await site.start("instance", name, **env)
    assert process.record.phase == INSTANCE_PHASE_BLANK
    return process


def again(site: Site, process: Process) -> Process:
    """The same process with the address in its current record."""
    record = site.view.records[process.record.instance_id]
    return site.process(process.child, process.log_file, record)
