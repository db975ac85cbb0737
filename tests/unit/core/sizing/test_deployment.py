"""The slots, links and names of a deployment."""

from __future__ import annotations

import math

import pytest

from loadtests.sizing.scenes import SCENES
from pdmesh.core.sizing.deployment import (
    MAX_SLOTS,
    PoolSize,
    fused,
    held_by,
    link_busy,
    most_running,
    pair_of,
    slots_for,
    transfer_times,
)

WANTED = SCENES[0].wanted(20.0)
KIND = WANTED.kinds[0]


def test_a_deployment_is_called_by_its_instances() -> None:
    pool = PoolSize(KIND, 2)
    pair = pair_of(pool, PoolSize(KIND, 3), WANTED.traffic, WANTED.goals)
    fusion = fused(pool, WANTED.traffic, WANTED.goals)
    assert (str(pair), pair.num_gpus, pair.is_fusion) == ("2P:3D", 5, False)
    assert (str(fusion), fusion.num_gpus, fusion.is_fusion) == ("2 fusion", 2, True)
    assert fusion.seen.transfer_s == 0.0 < pair.seen.transfer_s


def test_kv_travels_at_the_slower_end() -> None:
    wide = WANTED.kinds[1]
    times = transfer_times(wide, KIND, WANTED.traffic)
    request = WANTED.traffic.requests[0]
    assert times[0] == pytest.approx(request.num_prompt * KIND.kv_token_bytes / 50e9)
    assert link_busy(wide, 2, WANTED.traffic) == pytest.approx(link_busy(KIND, 4, WANTED.traffic))


def test_slots_cover_the_batch_within_the_memory() -> None:
    assert slots_for(10.0, 256) == 32
    assert slots_for(10.0, 20) == 20
    assert slots_for(math.inf, 256) == 256
    held = held_by(WANTED.traffic)
    assert most_running(KIND, held) == min(MAX_SLOTS, int(KIND.kv_tokens / held.reserved))
