"""Compares the master's metrics of a scenario with values that the test computes from the requests'
own events.
"""

from __future__ import annotations

import asyncio
import statistics
import urllib.request
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from loadtests.placement.phi_mesh import exported, scenario_metrics
from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.support.streams import stream_completion
from tests.support.waiting import until

NUM_REQUESTS = 16  # up to twenty requests have equal weights in the exported means
PREFILL_SLOTS, DECODE_SLOTS = 6, 2  # some prompts must wait for a decode slot


def spec() -> MeshSpec:
    return MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        start_timeout_s=180,
        service_env={
            "prefill": {"PDMESH_PREFILL_NUM_SLOTS": str(PREFILL_SLOTS)},
            "decode": {
                "PDMESH_DECODE_NUM_SLOTS": str(DECODE_SLOTS),
                "PDMESH_DECODE_MAX_WAITING": "0",
            },
        },
    )


def page(mesh: Mesh) -> str:
    url = f"http://{mesh.ops_address('master-scheduler')}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read(), "utf-8")


def decode_ms(event: RequestFinished) -> float:
    return event.e2e_ms - event.ttft_ms - event.decode_queue_ms


@pytest.mark.req("S2", "S138")
async def test_every_term_of_phi_equals_what_the_events_say(tmp_path: Path) -> None:
    async with Mesh(spec(), tmp_path) as mesh, httpx.AsyncClient(timeout=60) as client:
        bus = await NatsBus.connect(mesh.nats_url, "test-terms")
        events: list[RequestFinished] = []

        async def take(message: Message) -> None:
            events.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), take)
        prompts = [[40 + n % 3] * 128 + [50 + n] * (20 + n) for n in range(NUM_REQUESTS)]
        outcomes = await asyncio.gather(
            *(stream_completion(client, mesh.http_url, p, 8, ignore_eos=True) for p in prompts)
        )
        assert all(o.is_complete for o in outcomes)
        await until(lambda: len(events) == NUM_REQUESTS)

        def mean(of: Callable[[RequestFinished], float]) -> float:
            return statistics.fmean(of(event) for event in events)

        t_p = mean(lambda e: e.ttft_ms - e.queue_ms) / 1e3
        t_d = mean(decode_ms) / 1e3
        # On a slow machine, a transfer may end after the first token. The remaining time counts as
        # 0 then.
        decodes = [max(0.0, decode_ms(e) - e.kv_transfer_ms) for e in events]
        tpot = statistics.fmean(decodes) / 1e3 / 7
        shown = ""

        def has_seen_all() -> bool:
            nonlocal shown
            shown = page(mesh)
            return scenario_metrics(shown, "default").get("t_p") == pytest.approx(t_p)

        await until(has_seen_all)
        await bus.close()
    found, terms = scenario_metrics(shown, "default"), exported(shown)
    assert {name: found[name] for name in ("t_p", "t_d", "xi", "decode_queue", "queue")} == {
        "t_p": pytest.approx(t_p),
        "t_d": pytest.approx(t_d),
        "xi": pytest.approx(mean(lambda e: e.kv_transfer_ms) / 1e3),
        "decode_queue": pytest.approx(mean(lambda e: e.decode_queue_ms) / 1e3),
        "queue": pytest.approx(mean(lambda e: e.queue_ms) / 1e3),
    }
    assert found["decode_queue"] > 0.05, "some requests must have waited for a decode"
    assert found["tpot"] == pytest.approx(tpot)
    hits = mean(lambda e: e.usage.num_cached_tokens / e.usage.num_prompt_tokens)
    assert found["hit_share"] == pytest.approx(hits)
    assert found["rate/prefill"] == pytest.approx(PREFILL_SLOTS / t_p)
    assert found["rate/decode"] == pytest.approx(DECODE_SLOTS / t_d)
    least = min(found["rate/arrivals"], found["rate/prefill"], found["rate/decode"])
    assert found["phi"] == pytest.approx(least / 2)
    assert (terms.t_p, terms.t_d) == pytest.approx((t_p, t_d))
    assert (terms.b_p, terms.b_d) == (PREFILL_SLOTS, DECODE_SLOTS)
