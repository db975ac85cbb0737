"""Three regions far apart, of which one is lost while streams run in the others.

The regions are hosts of deploy/hosts/regions.yaml. Requests stay in their region. Between any two
regions, there are 40 ms of latency each way and 0.2 % loss. The lost region has one of the three
NATS servers, and Redis' first primary.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from tests.support.hosts.cluster import ROOT, Cluster, cluster, why_no_redis
from tests.support.hosts.network import Cable, why_not
from tests.support.hosts.wholeness import Observer
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, num_begun, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis() or "-"),
    # After the loss of a server, nats-py leaves its socket to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
]

FAR = Cable(latency_s=0.04, loss=0.002)
LOST, KEPT = "eu1", ("us1", "ap1")
NUM_STREAMS, MAX_TOKENS = 6, 120  # in each region
ENV = {"PDMESH_LEASE_S": "6", "PDMESH_KV_CACHE_INDEX_REDIS_TIMEOUT_S": "1"}

Ask = Callable[[str, int], Coroutine[Any, Any, list[StreamOutcome]]]


def asking(running: Cluster, client: httpx.AsyncClient, under_way: list[StreamOutcome]) -> Ask:
    """A function that runs streams, and adds their outcomes to `under_way` when they begin."""

    async def ask(region_host: str, seed: int) -> list[StreamOutcome]:
        """Run streams at the gateway of this host, all at the same time."""
        rng = random.Random(f"{region_host} {seed}")
        prompts = [
            [rng.randrange(40, 120) for _ in range(rng.randrange(1, 300))]
            for _ in range(NUM_STREAMS)
        ]
        url = running.url(region_host)
        return await asyncio.gather(
            *(
                stream_completion(client, url, p, MAX_TOKENS, under_way, ignore_eos=True)
                for p in prompts
            )
        )

    return ask


def check(outcomes: list[StreamOutcome], reference: fleet.Reference) -> None:
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        assert outcome.text == reference.text(list(outcome.prompt), MAX_TOKENS)


@pytest.mark.req("S10", "S58")
@pytest.mark.fault("F1", "F7", "F18", "F23")
async def test_a_lost_region_stops_no_stream_of_the_others(tmp_path: Path) -> None:
    reference = fleet.Reference.load(tmp_path / "model")
    finished: list[RequestFinished] = []

    async def on_finished(message: Message) -> None:
        finished.append(decode_event(message, RequestFinished))

    async with cluster(ROOT / "deploy/hosts/regions.yaml", tmp_path, FAR, ENV) as running:
        headers = {"authorization": f"Bearer {running.api_key}"}
        with running.as_admin():
            async with (
                Observer.of(running) as observer,
                httpx.AsyncClient(timeout=60, headers=headers) as client,
            ):
                await observer.bus.subscribe(subjects.request_finished(), on_finished)
                await _until_whole(observer)
                under_way: list[StreamOutcome] = []
                ask = asking(running, client, under_way)
                for outcomes in await asyncio.gather(*(ask(host, 1) for host in running.hosts)):
                    check(outcomes, reference)
                await until(lambda: len(finished) >= 3 * NUM_STREAMS)
                for each in finished:
                    home = running.host_of(each.header.publisher_id)
                    assert {running.host_of(i) for i in (each.prefill_id, each.decode_id)} == {home}

                under_way.clear()
                going = [asyncio.create_task(ask(host, 2)) for host in KEPT]
                # all streams decode
                await until(lambda: num_begun(under_way) == len(KEPT) * NUM_STREAMS)
                running.network.isolate(LOST)
                running.network.kill_all(LOST)
                running.reap(LOST)
                for outcomes in await asyncio.gather(*going):
                    check(outcomes, reference)
                for host in KEPT:  # the lost region is still away
                    check(await ask(host, 3), reference)
                await until(lambda: _is_gone(observer))

                running.network.heal()
                running.start(LOST)
                await _until_whole(observer)
                check(await ask(LOST, 4), reference)


def _is_gone(observer: Observer) -> bool:
    return not any(observer.cluster.host_of(name) == LOST for name in observer.view.records)


async def _until_whole(observer: Observer) -> None:
    lacking: list[str] = []

    async def is_whole() -> bool:
        lacking[:] = await observer.lacks()
        return not lacking

    try:
        await until(is_whole, 240)
    except AssertionError as exc:
        raise AssertionError(f"not whole: {lacking}") from exc
