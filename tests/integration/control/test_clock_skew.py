"""Runs machines whose clocks differ by two hours and then jump. No service may depend on these
clocks (F26).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.atomic_file import write_atomically
from pdmesh.events.v1.events_pb2 import Header, HealthChanged, InstanceHealth, RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites import fleet
from tests.support.sites.groups import asking
from tests.support.waiting import until

CLOCK = Path(__file__).parents[2] / "fakes" / "skewed_clock"
HOUR_S = 3600
# The processes of the two machines. A node agent and its instances need the same machine, because
# they share a file.
FAST = ("prefill-0", "prefill-1", "decode-0", "node-agent", "kv-cache-index")
SLOW = ("decode-1", "gateway-0", "master-scheduler", "health-monitor")
LEASES = 3  # how many heartbeats an instance sends during one lease


class Clocks:
    """The wall clocks of both machines, as their processes read them."""

    def __init__(self, directory: Path) -> None:
        self._files = {machine: directory / f"{machine}.skew" for machine in ("fast", "slow")}
        self.set(fast_s=HOUR_S, slow_s=-HOUR_S)

    def set(self, *, fast_s: int, slow_s: int) -> None:
        write_atomically(self._files["fast"], str(fast_s))
        write_atomically(self._files["slow"], str(slow_s))

    def environment(self) -> dict[str, dict[str, str]]:
        path = os.pathsep.join([str(CLOCK), *filter(None, sys.path)])
        return {
            name: {"PYTHONPATH": path, "SKEW_FILE": str(self._files[machine])}
            for machine, names in (("fast", FAST), ("slow", SLOW))
            for name in names
        }


class Heard:
    """The mesh's events on NATS, and the skew of each event's clock relative to the clock of this
    test.
    """

    def __init__(self) -> None:
        self.skews: dict[str, list[float]] = {}
        self.verdicts: list[HealthChanged] = []
        self.finished: list[RequestFinished] = []

    async def health(self, message: Message) -> None:
        self._time(decode_event(message, InstanceHealth).header)

    async def changed(self, message: Message) -> None:
        self.verdicts.append(decode_event(message, HealthChanged))

    async def end(self, message: Message) -> None:
        event = decode_event(message, RequestFinished)
        self._time(event.header)
        self.finished.append(event)

    def _time(self, header: Header) -> None:
        skew_s = header.occurred_at.ToNanoseconds() / 1e9 - time.time()
        self.skews.setdefault(header.publisher_id, []).append(skew_s)

    def num_since(self, name: str, skew_s: float) -> int:
        """How many events of the process carry this skew."""
        return sum(abs(found - skew_s) < HOUR_S / 2 for found in self.skews.get(name, ()))


@pytest.mark.fault("F26")
async def test_clocks_that_disagree_and_jump_change_nothing(tmp_path: Path) -> None:
    clocks, heard = Clocks(tmp_path), Heard()
    reference = fleet.Reference.load(tmp_path / "model")
    spec = replace(fleet.two_by_two(clocks.environment()), node_agent=True)
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        pids = {name: mesh.pid(name) for name in (*FAST, *SLOW)}
        bus = await NatsBus.connect(mesh.nats_url, "test")
        await bus.subscribe(subjects.health_instance(), heard.health)
        await bus.subscribe(subjects.health_changed(), heard.changed)
        await bus.subscribe(subjects.request_finished(), heard.end)
        async with asking(mesh.http_url) as outcomes:
            await until(lambda: all(heard.num_since(n, HOUR_S) for n in FAST))
            await until(lambda: all(heard.num_since(n, -HOUR_S) for n in SLOW))
            clocks.set(fast_s=-HOUR_S, slow_s=HOUR_S)
            beats = 2 * LEASES
            await until(lambda: all(heard.num_since(n, -HOUR_S) >= beats for n in FAST), 30)
            await until(lambda: all(heard.num_since(n, HOUR_S) >= beats for n in SLOW), 30)
        assert {name: mesh.pid(name) for name in pids} == pids
        await bus.close()
    assert len(outcomes) > 20
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        assert reference.text(list(outcome.prompt), 40).startswith(outcome.text)
    assert heard.verdicts == []
    assert not any(end.num_migrations for end in heard.finished)
