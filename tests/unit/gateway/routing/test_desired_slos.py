"""Gateways use the SLOs of the desired state as soon as it changes (S9, S44)."""

from __future__ import annotations

import pytest

from pdmesh.core.request.events import RequestLimits
from pdmesh.core.request.slo import ScenarioSlo, Slos
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.services.gateway.routing.desired_slos import DesiredSlos
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.support.waiting import until

LIMITS = RequestLimits(deadline_s=60.0, ttft_s=10.0, answer_s=1.0, stall_s=1.0)
FILE = "scenarios:\n  chat: {slo: {ttft_s: 2, ttft_s_per_1k_tokens: 1, default_text: busy}}\n"


@pytest.mark.req("S9", "S44")
@pytest.mark.fault("F20")
async def test_slos_follow_the_file_and_otherwise_the_settings() -> None:
    bucket = MemoryBucket()
    store = DesiredStore(bucket)  # type: ignore[arg-type]  # a fake
    slos = Slos(LIMITS, scenarios={"chat": ScenarioSlo(7.0), "other": ScenarioSlo(8.0)})
    following = DesiredSlos(slos)
    following.watch(store)
    bucket.watches[0].open()

    async def apply(text: str) -> None:
        await store.apply(text, expected_version=None, author="ann", reason="")

    def ttft_s(scenario: str, num_tokens: int = 0) -> float:
        return slos.limits_for(scenario, num_tokens).ttft_s

    assert (ttft_s("chat"), ttft_s("other"), ttft_s("x")) == (7.0, 8.0, 10.0)
    await apply(FILE)
    await until(lambda: ttft_s("chat", 3000) == 5.0)
    assert (slos.default_text("chat"), ttft_s("other")) == ("busy", 8.0)
    await apply(FILE + "of_a_later_release: 1\n")
    await apply(FILE.replace("ttft_s: 2", "ttft_s: 3"))
    await until(lambda: ttft_s("chat") == 3.0)
    await apply("")
    await until(lambda: ttft_s("chat") == 7.0)
    await following.close()
