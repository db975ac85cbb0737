"""Every process is stopped in order and started again, one after another, under load.

No client notices this (F41).
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.nemesis.arena import arena
from tests.chaos.nemesis.invariants import SETTLE_S, settled, within
from tests.chaos.nemesis.plan import GATEWAYS
from tests.support.attack.steady_clients import Clients
from tests.support.sites import fleet
from tests.support.waiting import until

STEP_S = 15.0  # the longest time until a process is ready again
SLACK_S = 5.0  # for a loaded machine with two cores
# When a gateway closes its listener, a waiting connection is reset or refused. A refusal tells the
# client to try elsewhere.
MAX_UNLUCKY = 2


@pytest.mark.timeout(400)
@pytest.mark.req("S10", "S24", "S72")
@pytest.mark.fault("F41")
async def test_a_rolling_restart_of_everything_fails_no_request(tmp_path: Path) -> None:
    reference = fleet.Reference.load(tmp_path / "model")
    async with (
        arena(tmp_path, print) as world,
        Clients(world.mesh.http_url, seed=1, keys=[*world.keys.values()]) as clients,
    ):
        for name in world.mesh.names:
            pid, began = world.mesh.pid(name), time.monotonic()
            await world.mesh.restart(name, timeout_s=STEP_S + SLACK_S)
            took_s = time.monotonic() - began
            assert world.mesh.pid(name) != pid
            missing = await within(SETTLE_S, lambda: settled(world))
            assert not missing, f"after {name}: {missing}"
            num_asked = clients.num_asked
            await until(lambda num=num_asked: clients.num_asked > num + 3)
            asked = clients.take()
            print(f"{name}: {took_s:.1f} s, {len(asked)} requests")
            assert took_s < STEP_S + SLACK_S
            num_unlucky = 0
            for each in asked:
                outcome = each.outcome
                assert outcome is not None, f"{name}: a request did not end"
                if outcome.is_complete:
                    assert outcome.text == reference.text(list(each.prompt), each.max_tokens), name
                else:
                    num_unlucky += 1
                    assert outcome.was_cut or (outcome.error or {})["code"] == "draining", outcome
                    assert not outcome.text, f"{name}: a stream that had begun was not ended"
            assert num_unlucky <= (MAX_UNLUCKY if name in GATEWAYS else 0), name
