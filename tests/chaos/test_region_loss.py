"""A region is lost: all its instances, its gateway and its master at once (S58).

The other region takes over the scenarios, and later gives them back. The scenario `chat` has a
group in each region. `notes` has one group, with its home in eu and with us as the fallback.

Each client belongs to a region and sends requests to the gateway of that region. A simulated load
balancer sends a request to the other gateway if the connection is refused. The mesh must recover
within RECOVERED_S, and only requests in flight at the lost gateway may fail.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.sites import fleet
from tests.support.sites.operator import CHANGE_S, Operator
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

RECOVERED_S = 10.0
NUM_TOKENS = 30
LOST, KEPT = "eu", "us"
SCENARIOS = ("chat", "notes")
GROUPS = """
regions: [eu, us]
scenarios:
  chat: {}
  notes: {allow_single: true}
groups:
  chat-eu: {scenario: chat, prefill: 1, decode: 1, region: eu}
  chat-us: {scenario: chat, prefill: 1, decode: 1, region: us}
  notes: {scenario: notes, fusion: 1, region: eu, failover: [us]}
"""


def spec(groups_file: Path) -> MeshSpec:
    return MeshSpec(
        engine="sim",
        num_prefill=0,
        num_decode=0,
        num_blank=3,
        groups_file=groups_file,
        regions=(LOST, KEPT),
        http_port=0,
        grpc_port=0,
        start_timeout_s=90,
        env={"PDMESH_GATEWAY_TTFT_S": "20"},
    )


@dataclass
class Asked:
    """One request of a client in `region`, through the gateway of the region `via`."""

    region: str
    scenario: str
    outcome: StreamOutcome
    via: str
    begun_at: float  # when the request's gateway was chosen


@dataclass
class Clients:
    """Clients of both regions and both scenarios.

    Each client sends requests one after another until the block ends.
    """

    mesh: Mesh
    asked: list[Asked] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)  # requests in flight by region
    _is_over: bool = False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as tasks:
            for seed, region in enumerate((LOST, KEPT) * 2):
                for scenario in SCENARIOS:
                    tasks.create_task(self._ask(client, region, scenario, seed))
            try:
                yield
            finally:
                self._is_over = True

    async def _ask(self, client: httpx.AsyncClient, region: str, scenario: str, seed: int) -> None:
        order = random.Random(f"{seed} {scenario}")
        while not self._is_over:
            prompt = [40 + order.randrange(80) for _ in range(order.randrange(1, 200))]
            begun_at = time.monotonic()
            self.in_flight[region] += 1
            via = region if await self._listens(region) else KEPT
            outcome = await stream_completion(
                client, self.mesh.http_url_in(via), prompt, NUM_TOKENS,
                ignore_eos=True, scenario=scenario,
            )  # fmt: skip
            self.in_flight[region] -= 1
            self.asked.append(Asked(region, scenario, outcome, via, begun_at))

    async def _listens(self, region: str) -> bool:
        """Whether a load balancer's health check of the region's gateway succeeds."""
        port = self.mesh.wiring.ports[region].http
        try:
            _, writer = await asyncio.open_connection(self.mesh.spec.host, port)
        except OSError:
            return False
        writer.close()
        return True

    def since(self, mark: float) -> list[Asked]:
        return [a for a in self.asked if a.begun_at >= mark]

    def failed(self) -> list[Asked]:
        return [a for a in self.asked if not a.outcome.is_complete]

    async def until_answered_in(self, region: str) -> float:
        """Wait until clients of `region` got an answer to a new request for each scenario.

        Returns the seconds.
        """
        mark = time.monotonic()
        wanted = set(SCENARIOS)

        def are_answered() -> bool:
            own = [a for a in self.since(mark) if a.region == region and a.outcome.is_complete]
            return {a.scenario for a in own} == wanted

        return await until(are_answered, within_s=CHANGE_S)


async def where(operator: Operator, group_id: str) -> str:
    """The region in which the whole group serves. Empty if the group does not serve."""
    for group in (await operator.groups()).groups:
        if group.group_id == group_id and group.state == "serving":
            return ",".join({m.instance_id.partition("-")[0] for m in group.members})
    return ""


@pytest.mark.timeout(300)
@pytest.mark.req("S10", "S37", "S58")
@pytest.mark.fault("F1", "F7", "F9", "F11")
async def test_the_other_region_takes_over_all_scenarios_and_gives_them_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(GROUPS)
    reference = fleet.Reference.load(tmp_path / "model")
    served_by: list[RequestFinished] = []
    async with Mesh(spec(file), tmp_path / "mesh", report=print) as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")

        async def on_finished(message: Message) -> None:
            served_by.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), on_finished)
        operator = Operator(bus)

        async def is_home() -> bool:
            homes = {"chat-eu": "eu", "chat-us": "us", "notes": "eu"}
            return all([await where(operator, g) == home for g, home in homes.items()])

        await until(is_home, within_s=CHANGE_S)
        clients = Clients(mesh)
        async with clients.asking():
            for region in (LOST, KEPT):
                await clients.until_answered_in(region)
            _check_homes(served_by, {"chat": None, "notes": LOST})

            num_in_flight = clients.in_flight[LOST]
            lost = mesh.lose_region(LOST)
            lost_at = time.monotonic()
            assert len(lost) == 5  # three instances, a gateway and a master
            await until(lambda: not any(map(mesh.supervisor.pid, lost)), within_s=CHANGE_S)
            gone_at = time.monotonic()  # until then, the kernel accepts connections for the gateway
            answered_s = [await clients.until_answered_in(region) for region in (LOST, KEPT)]
            await until(lambda: _is_where(operator, "notes", KEPT), within_s=CHANGE_S)
            recovered_s = time.monotonic() - lost_at
            failed = clients.failed()
            num_cut = len([a for a in failed if a.begun_at <= lost_at])
            assert num_cut <= num_in_flight
            assert [a for a in failed if a.via != LOST or a.begun_at > gone_at] == []

            moved_at = time.time()
            for region in (LOST, KEPT):
                await clients.until_answered_in(region)
            _check_homes(_since(moved_at, served_by), {"chat": KEPT, "notes": KEPT})

            num_failed = len(clients.failed())
            return_began = time.monotonic()
            mesh.return_region(LOST)
            await mesh.wait_ready(lost)
            await until(is_home, within_s=CHANGE_S)
            returned_at = time.time()
            for region in (LOST, KEPT):
                await clients.until_answered_in(region)
            await until(lambda: _since(returned_at, served_by), within_s=CHANGE_S)
            _check_homes(_since(returned_at, served_by), {"chat": None, "notes": LOST})
            assert len(clients.failed()) == num_failed  # no request failed because of the return
            took = [a.outcome.ended_at - a.begun_at for a in clients.since(return_began)]
        print(f"region lost: {num_cut} of {num_in_flight} requests in flight there failed and "
            f"{num_failed - num_cut} that its"
              " gateway took while it died, new ones of eu and us were"
              f" answered after {answered_s} s, all groups are whole after {recovered_s:.1f} s; "
              f"of {len(took)} asked from its return on none failed, the longest"
              f" took {max(took):.1f} s")  # fmt: skip
        assert recovered_s < RECOVERED_S
        for asked in clients.asked:
            if asked.outcome.is_complete:
                assert asked.outcome.text == reference.text(list(asked.outcome.prompt), NUM_TOKENS)
        await bus.close()


async def _is_where(operator: Operator, group_id: str, region: str) -> bool:
    return await where(operator, group_id) == region


def _since(wall: float, finished: list[RequestFinished]) -> list[RequestFinished]:
    """The requests that began after this time."""
    return [
        f for f in finished if f.header.occurred_at.ToMicroseconds() / 1e6 - f.e2e_ms / 1e3 > wall
    ]


def _check_homes(finished: list[RequestFinished], homes: dict[str, str | None]) -> None:
    """Check in which region each request was served.

    The region is the scenario's home in `homes`. If this is None, it is the region of the request's
    gateway.
    """
    for each in finished:
        regions = {i.partition("-")[0] for i in (each.prefill_id, each.decode_id) if i}
        home = homes[each.scenario] or each.header.publisher_id.partition("-")[0]
        if each.num_migrations == 0 and each.outcome == "completed":
            assert regions == {home}, each
