"""A mesh on three hosts loses processes, servers, a whole host or a cable while streams run.

The hosts are network namespaces with real addresses, mutual TLS, latency and loss
(tests/support/hosts). They run deploy/hosts/hosts.yaml by the commands of docs/deploy.md: a NATS
cluster of three, Redis with two replicas and three sentinels, two gateways, two masters, two
prefills, two decodes. Every stream must get the text of a single simulated model. Only a stream of
a gateway that was hit may be cut. `make kill-matrix-hosts` writes the table "Across hosts" in
docs/kill-matrix.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.buckets import ALL_BUCKETS
from tests.support.hosts.cluster import ROOT, Cluster, cluster, why_no_redis
from tests.support.hosts.network import Cable, why_not
from tests.support.hosts.wholeness import Observer
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, num_begun, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis() or "-"),
    # After the loss of a server, nats-py leaves its socket to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
]

NUM_STREAMS, MAX_TOKENS = 24, 120  # 2.4 s of decoding
# how long a freeze or a cut lasts: longer than a lease, and than the time after which the sentinels
# replace a primary
AWAY_S = 8.0
SLACK_S = 1.5  # for a loaded machine with two cores
GATEWAYS = ("a", "b")


@dataclass
class World:
    cluster: Cluster
    observer: Observer
    reference: fleet.Reference
    client: httpx.AsyncClient
    # the latest streams, which may still run
    under_way: list[StreamOutcome] = field(default_factory=list)

    async def streams(self, prompts: list[list[int]], salt: str) -> list[StreamOutcome]:
        """Run a stream for each prompt, at the gateways in turn. Each starts 50 ms after the one
        before.

        Runs with different salts share no KV.
        """
        self.under_way.clear()
        began = [
            self._stream(GATEWAYS[i % len(GATEWAYS)], prompt, 0.05 * i, salt)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.wait_for(asyncio.gather(*began), 120)

    async def _stream(
        self, gateway: str, prompt: list[int], delay_s: float, salt: str
    ) -> StreamOutcome:
        await asyncio.sleep(delay_s)
        url = self.cluster.url(gateway)
        return await stream_completion(
            self.client, url, prompt, MAX_TOKENS, self.under_way, ignore_eos=True, cache_salt=salt
        )

    async def calm(self, prompts: list[list[int]]) -> float:
        """The longest silence of the same streams without a fault. Their texts must be right."""
        outcomes = await self.streams(prompts, "calm")
        for outcome in outcomes:
            assert outcome.is_complete, outcome
            assert self.fits(outcome)
        return max(outcome.longest_gap_s for outcome in outcomes)

    def fits(self, outcome: StreamOutcome) -> bool:
        return outcome.text == self.reference.text(list(outcome.prompt), MAX_TOKENS)

    async def until_whole(self) -> float:
        """Wait until nothing is missing and each gateway answers a new request.

        Returns the seconds.
        """
        began = time.monotonic()
        lacking: list[str] = []

        async def is_whole() -> bool:
            lacking[:] = await self.observer.lacks()
            return not lacking

        try:
            await until(is_whole, 180)
        except AssertionError as exc:
            raise AssertionError(f"not whole: {lacking}") from exc
        for gateway in GATEWAYS:
            outcome = await stream_completion(
                self.client, self.cluster.url(gateway), [50, 51, 52], 8, ignore_eos=True
            )
            assert outcome.is_complete, outcome
            assert outcome.text == self.reference.text([50, 51, 52], 8)
        return time.monotonic() - began


def make_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.choice((1, 17, 63, 64, 65, 129, 300)) for _ in range(NUM_STREAMS)]
    return [[rng.randrange(40, 120) for _ in range(n)] for n in lengths]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """All cases share one mesh, so each case also finds what earlier faults left behind."""
    directory = tmp_path_factory.mktemp("hosts")
    async with contextlib.AsyncExitStack() as stack:
        file = ROOT / "deploy/hosts/hosts.yaml"
        running = await stack.enter_async_context(cluster(file, directory, Cable()))
        stack.enter_context(running.as_admin())
        observer = await stack.enter_async_context(Observer.of(running))
        headers = {"authorization": f"Bearer {running.api_key}"}
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, headers=headers))
        reference = fleet.Reference.load(directory / "model")
        world = World(running, observer, reference, client)
        await world.until_whole()
        yield world


@pytest.mark.req("S37")
async def test_in_calm_each_request_has_its_text_and_kv_crosses_hosts(world: World) -> None:
    finished: list[RequestFinished] = []

    async def on_finished(message: Message) -> None:
        finished.append(decode_event(message, RequestFinished))

    subscription = await world.observer.bus.subscribe(subjects.request_finished(), on_finished)
    await world.calm(make_prompts(seed=1000))
    await until(lambda: len(finished) >= NUM_STREAMS)
    await subscription.unsubscribe()
    host_of = world.cluster.host_of
    over_hosts = [e for e in finished if host_of(e.prefill_id) != host_of(e.decode_id)]
    assert any(event.kv_transfer_ms for event in over_hosts), "no KV crossed hosts"
    for bucket in ALL_BUCKETS:
        found = await world.observer.stream(bucket)
        assert found.config.num_replicas == 3, bucket


@dataclass
class Fault:
    """A fault.

    When `do` returns, freezes and cuts have ended, and a lost host has been restarted.
    """

    name: str  # the name of the target in the table
    what: str  # the fault, for the table
    do: Callable[[World], Awaitable[set[str]]]  # returns the hosts whose gateways were hit
    gap_s: float  # the longest silence that the fault may add to a stream (FAULTS.md)
    faults: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.name}-{self.what}".replace(" ", "_")


def killed(host: str, kind: str) -> Callable[[World], Awaitable[set[str]]]:
    async def do(world: World) -> set[str]:
        os.kill(world.cluster.pid(host, f"{host}-{kind}"), signal.SIGKILL)
        return {host} if kind.startswith("gateway") else set()

    return do


async def leader_killed(world: World) -> set[str]:
    leader = world.observer.leader()
    assert leader, "no master leads"
    os.kill(world.cluster.pid(world.cluster.host_of(leader), leader), signal.SIGKILL)
    return set()


async def _hit_server(world: World, host: str, server: str, number: signal.Signals) -> None:
    pid = world.cluster.pid(host, server)
    os.kill(pid, number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(AWAY_S)
        os.kill(pid, signal.SIGCONT)


def nats_leader(number: signal.Signals) -> Callable[[World], Awaitable[set[str]]]:
    """Send a signal to the NATS server that leads the stream of the registry's records."""

    async def do(world: World) -> set[str]:
        await _hit_server(world, (await world.observer.stream()).cluster.leader, "nats", number)
        return set()

    return do


def redis_primary(number: signal.Signals) -> Callable[[World], Awaitable[set[str]]]:
    async def do(world: World) -> set[str]:
        before = await world.observer.primary()
        assert before, "no primary"
        await _hit_server(world, before, "redis", number)
        if number is signal.SIGSTOP:
            await until(lambda: _has_other_primary(world, before))
        return set()

    return do


async def _has_other_primary(world: World, before: str) -> bool:
    return await world.observer.primary() not in ("", before)


def host_lost(host: str) -> Callable[[World], Awaitable[set[str]]]:
    """The host loses its power, and so its cable and all processes. It returns after AWAY_S."""

    async def do(world: World) -> set[str]:
        world.cluster.network.isolate(host)
        world.cluster.network.kill_all(host)
        world.cluster.reap(host)
        await asyncio.sleep(AWAY_S)
        world.cluster.network.heal()
        world.cluster.start(host)
        return {host}

    return do


def cable_cut(*hosts: str) -> Callable[[World], Awaitable[set[str]]]:
    async def do(world: World) -> set[str]:
        world.cluster.network.cut(hosts)
        await asyncio.sleep(AWAY_S)
        world.cluster.network.heal()
        return set()

    return do


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = [
    Fault("prefill on a", "killed", killed("a", "prefill-0"), 3.0),
    Fault("prefill on c", "killed", killed("c", "prefill-0"), 3.0),
    Fault("decode on b", "killed", killed("b", "decode-0"), 3.0),
    Fault("decode on c", "killed", killed("c", "decode-0"), 3.0),
    Fault("gateway on b", "killed", killed("b", "gateway-0"), 3.0),
    Fault("leading master", "killed", leader_killed, 1.0),
    Fault("kv-cache-index on c", "killed", killed("c", "kv-cache-index"), 1.0),
    Fault("health-monitor on b", "killed", killed("b", "health-monitor"), 1.0),
    Fault("NATS, leader of the records", "killed", nats_leader(KILL), 1.0),
    Fault("NATS, leader of the records", f"frozen for {AWAY_S:g} s", nats_leader(STOP), 1.0),
    Fault("Redis, primary", "killed", redis_primary(KILL), 1.0),
    Fault("Redis, primary", f"frozen for {AWAY_S:g} s and more", redis_primary(STOP), 1.0),
    Fault("host a", f"lost for {AWAY_S:g} s", host_lost("a"), 4.5),
    Fault("host b", f"lost for {AWAY_S:g} s", host_lost("b"), 4.5),
    Fault("host c", f"lost for {AWAY_S:g} s", host_lost("c"), 4.5),
    Fault("cable a-b", f"cut for {AWAY_S:g} s", cable_cut("a", "b"), 4.5),
    Fault("cable b-c", f"cut for {AWAY_S:g} s", cable_cut("b", "c"), 4.5),
    Fault("cable a-c", f"cut for {AWAY_S:g} s", cable_cut("a", "c"), 4.5),
]


@dataclass
class Measured:
    """One row of the table."""

    number: int  # the place of the row
    name: str
    what: str
    num_complete: int
    num_errors: int
    num_cut: int
    # at gateways that were not hit, because a client of a lost host gets no message
    longest_gap_s: float
    gap_bound_s: float
    whole_s: float  # from the end of the fault until nothing was missing


@pytest.mark.req("S37", "S74")
@pytest.mark.fault("F1", "F5", "F7", "F9", "F11", "F14", "F16", "F18", "F19", "F23")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_every_stream_ends_well_when_a_part_of_three_hosts_is_lost(
    fault: Fault, world: World
) -> None:
    prompts = make_prompts(seed=FAULTS.index(fault))
    calm_gap_s = await world.calm(prompts)
    streaming = asyncio.create_task(world.streams(prompts, "fault"))
    # Half of the streams decode. The others prefill, are handed over, or start later.
    await until(lambda: num_begun(world.under_way) >= NUM_STREAMS // 2)
    hit = await fault.do(world)
    outcomes = await streaming
    whole_s = await world.until_whole()
    await _until_nothing_held(world)
    measured = Measured(
        number=FAULTS.index(fault),
        name=fault.name,
        what=fault.what,
        num_complete=sum(o.is_complete for o in outcomes),
        num_errors=sum(o.error is not None for o in outcomes),
        num_cut=sum(o.was_cut for o in outcomes),
        longest_gap_s=round(max(o.longest_gap_s for o in _elsewhere(outcomes, hit)), 2),
        gap_bound_s=round(fault.gap_s + SLACK_S + max(1.0, calm_gap_s), 2),
        whole_s=round(whole_s, 1),
    )
    _record(measured)
    _judge(world, outcomes, hit, measured)


async def _until_nothing_held(world: World) -> None:
    held: dict[str, str] = {}

    async def is_free() -> bool:
        held.clear()
        held.update(await world.observer.held())
        return not held

    try:
        await until(is_free, 14.0)
    except AssertionError as exc:
        raise AssertionError(f"held: {held}") from exc


def _elsewhere(outcomes: list[StreamOutcome], hit: set[str]) -> list[StreamOutcome]:
    """The outcomes of the streams at gateways that were not hit."""
    return [o for i, o in enumerate(outcomes) if GATEWAYS[i % len(GATEWAYS)] not in hit]


def _record(measured: Measured) -> None:
    print(measured)
    if directory := os.environ.get("KILL_MATRIX_DIR"):
        folder = Path(directory) / "hosts"
        folder.mkdir(exist_ok=True)
        (folder / f"{measured.number:02}.json").write_text(json.dumps(asdict(measured)))


def _judge(world: World, outcomes: list[StreamOutcome], hit: set[str], measured: Measured) -> None:
    for i, outcome in enumerate(outcomes):
        assert not outcome.fault_in_ending(), outcome.fault_in_ending()
        if outcome.is_complete:
            assert world.fits(outcome), "tokens lost, doubled or foreign"
            continue
        gateway = GATEWAYS[i % len(GATEWAYS)]
        assert gateway in hit, f"{outcome.error or 'cut'} at {gateway}, which was not hit"
        expected = world.reference.text(list(outcome.prompt), MAX_TOKENS)
        assert expected.startswith(outcome.text), "tokens lost, doubled or foreign"
    assert measured.longest_gap_s <= measured.gap_bound_s
