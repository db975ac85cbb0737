"""The mesh's cores on a virtual clock.

Nothing is lost, the laws of computing time hold, and policies differ as in the papers.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from loadtests.sim import phi_check
from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import (
    Arrival,
    block_name,
    poisson,
    prefixed_scenarios,
    scaled,
)
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import PADDED_CPU, SMOLLM2_CPU

# A prefill takes 1 ms for each token that must be computed. A decode step takes 1 ms.
PER_TOKEN = Law("per-token", prefill_token_s=1e-3, step_fixed_s=1e-3)
PAIR = MeshShape(PER_TOKEN, num_prefill=2, num_decode=1, prefill_slots=1, block_size=50)


def play(shape: MeshShape, policy: str, arrivals: list[Arrival], seed: int = 1) -> VirtualMesh:
    mesh = VirtualMesh(shape, policy, seed, Weights())
    mesh.run(arrivals)
    for worker in mesh.workers.values():
        worker.admission.check_invariants()
        worker.pool.check_invariants()
        assert worker.admission.num_slots_used == 0
        assert worker.pool.num_free == shape.num_blocks
    mesh.index.check_invariants()
    mesh.fleet.check_invariants()
    return mesh


def load(seed: int, count: int = 50, rate_per_s: float = 6.0) -> list[Arrival]:
    return prefixed_scenarios(
        random.Random(seed),
        num_scenarios=6,
        num_requests=count,
        prefix_tokens=512,
        num_tokens=640,
        num_output_tokens=8,
        rate_per_s=rate_per_s,
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("roles", [{"num_fusion": 3}, {"num_prefill": 3, "num_decode": 2}])
def test_every_request_is_answered_and_everything_given_back(
    policy: str, roles: dict[str, Any]
) -> None:
    shape = replace(MeshShape(SMOLLM2_CPU, num_blocks=64, prefill_slots=2, decode_slots=4), **roles)
    mesh = play(shape, policy, load(1))
    assert len(mesh.served) == 300
    assert all(s.e2e_s >= s.ttft_s > 0 for s in mesh.served)
    assert not any(s.is_refused for s in mesh.served)


@pytest.mark.req("S6", "S108")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_policy_finds_more_prefixes_than_policies_that_ignore_them(seed: int) -> None:
    """Each of three caches holds four prefixes, and six prefixes are in use. A policy that looks at
    the caches computes less, and so finishes sooner.
    """
    shape = MeshShape(SMOLLM2_CPU, num_fusion=3, num_blocks=48)
    reuse, slow = {}, {}
    for policy in ("default", "round_robin", "mixed_pool"):
        served = play(shape, policy, load(seed)).served
        reuse[policy] = sum(s.num_cached_tokens for s in served)
        slow[policy] = statistics.quantiles((s.prefill_s for s in served), n=20)[-1]
    assert reuse["default"] > 1.2 * max(reuse["round_robin"], reuse["mixed_pool"])
    assert slow["default"] < slow["mixed_pool"]


SHARES = (0, 20, 45, 70, 90)  # by scenario: the percentage of a prompt that other prompts share


class ByScenario(VirtualMesh):
    """A mesh in which each scenario has its own group of instances."""

    def scenario_of(self, arrival: Arrival) -> str:
        return arrival.scenario


def prompts_of_scenarios() -> list[Arrival]:
    """Prompts of 1,000 tokens, each of which begins with one of four heads of its scenario."""
    rng = random.Random(5)
    arrivals = []
    for number in range(1500):
        share = rng.choice(SHARES)
        head = rng.randrange(4)
        shared = [block_name(-share, head * 20 + part) for part in range(share // 5)]
        own = [block_name(number, part) for part in range(20 - len(shared))]
        arrivals.append(Arrival(2.0 * number, 1000, 2, (*shared, *own), f"scenario-{share}"))
    return arrivals


def hits_and_prefill_times(mesh: VirtualMesh) -> tuple[list[float], list[float]]:
    """The hit rates and the mean prefill times T_p of the scenarios, in the order of SHARES."""
    hits, times = [], []
    for share in SHARES:
        own = [s for s in mesh.served if s.arrival.scenario == f"scenario-{share}"]
        hits.append(sum(s.num_cached_tokens for s in own) / (1000 * len(own)))
        times.append(statistics.fmean(s.prefill_s for s in own))
    return hits, times


@pytest.mark.req("S5")
def test_few_prefills_for_a_scenarios_prefixes_raise_its_hit_rate_and_lower_its_prefill_time() -> (
    None
):
    """Ten instances hold 160 blocks each, and the policy ignores prefixes.

    Two instances for each scenario are compared with ten instances for all scenarios.
    """
    shape = MeshShape(PER_TOKEN, num_blocks=160, block_size=50, decode_slots=4)
    apart, together = (ByScenario(shape, "round_robin", 1, Weights()) for _ in range(2))
    for number in range(10):
        for mesh in (apart, together):
            scenario = f"scenario-{SHARES[number // 2]}" if mesh is apart else "default"
            mesh.add(f"fusion-{number}", Role.FUSION, f"group-{scenario}", scenario)
    arrivals = prompts_of_scenarios()
    apart.run(arrivals)
    together.run([replace(a, scenario="default") for a in arrivals])
    for served, arrival in zip(together.served, arrivals, strict=True):
        served.arrival = arrival
    hits, times = hits_and_prefill_times(apart)
    assert hits == pytest.approx([share / 100 for share in SHARES], abs=0.05)
    assert times == pytest.approx([1.0 - hit for hit in hits], rel=0.02), "the curve of the law"
    assert times == sorted(times, reverse=True)
    mixed_hits, mixed_times = hits_and_prefill_times(together)
    assert all(few > 1.5 * many for few, many in zip(hits[1:], mixed_hits[1:], strict=True))
    assert all(few < many for few, many in zip(times[1:], mixed_times[1:], strict=True))


@pytest.mark.req("S45", "S46")
@pytest.mark.parametrize("seed", [1, 2])
def test_under_four_times_its_load_a_mesh_accepts_what_formula_2_says(seed: int) -> None:
    """The mesh accepts n_p b_p / T_p requests per second, within 10 %. The formula counts all slots
    of the prefills, so the load must fill them.
    """
    shape = MeshShape(PER_TOKEN, num_prefill=4, num_decode=2, prefill_slots=4, ttft_slo_s=2.0)
    until_s, full_per_s = 30.0, 4 / 0.1  # four prompts at once, of 100 ms each
    rng = random.Random(seed)
    ats = sorted(rng.uniform(0.0, until_s) for _ in range(round(4 * full_per_s * until_s)))
    mesh = play(shape, "default", [Arrival(at, 100, 2) for at in ats], seed)
    steady = [s for s in mesh.served if s.arrival.at_s > 5.0 and not s.is_refused]
    accepted_per_s = len(steady) / (until_s - 5.0)
    prefill_s = statistics.fmean(s.prefill_s for s in steady)
    assert len(steady) < 0.4 * len(ats), "it is overloaded"
    assert accepted_per_s == pytest.approx(4 * 4 / prefill_s, rel=0.10)


def test_the_same_seed_gives_the_same_run() -> None:
    shape = MeshShape(SMOLLM2_CPU, num_prefill=3, num_decode=2, prefill_slots=2)
    runs = [[s.ttft_s for s in play(shape, "default", load(3), seed=9).served] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.req("S46")
def test_a_lone_request_takes_as_long_as_its_law_says() -> None:
    arrival = Arrival(0.0, 400, 11)
    (served,) = play(PAIR, "default", [arrival]).served
    # plan and back, prefill, token; TTFT does not include the start of the decode
    hops = 5 * PAIR.hop_s
    assert served.ttft_s == pytest.approx(0.4, abs=hops)
    transfer = 400 * PAIR.transfer_token_s
    assert served.e2e_s - served.ttft_s == pytest.approx(0.010 + transfer, abs=hops)


@pytest.mark.req("S40", "S41")
def test_a_prefill_keeps_its_slot_until_decode_has_taken_the_kv() -> None:
    """There is one slot, and a transfer takes half a second. The second prompt must wait for the
    transfer.
    """
    shape = replace(PAIR, num_prefill=1, transfer_token_s=0.005)
    served = play(shape, "default", [Arrival(0.0, 100, 2), Arrival(0.01, 100, 2)]).served
    assert served[1].ttft_s > 0.1 + 0.5 + 0.1 - 0.02
    assert served[1].num_rejections >= 1


@pytest.mark.req("S90")
def test_batches_of_similar_length_compute_less_padding() -> None:
    """Prefills serve a queue of chats and documents.

    They pad four prompts to the longest of them.
    """
    rng = random.Random(1)
    arrivals = [
        Arrival(0.01 * number, rng.choice((rng.randint(50, 150), rng.randint(800, 1200))), 2)
        for number in range(200)
    ]
    in_order = MeshShape(
        PADDED_CPU,
        num_prefill=2,
        num_decode=2,
        prefill_slots=4,
        prefill_batch=4,
        max_passed=0,
    )
    runs = [
        play(shape, "default", arrivals) for shape in (in_order, replace(in_order, max_passed=8))
    ]
    fifo, similar = (sum(w.num_padded_tokens for w in m.workers.values()) for m in runs)
    assert similar <= 0.7 * fifo
    fifo_s, similar_s = (sum(s.ttft_s for s in m.served) for m in runs)
    assert similar_s < fifo_s


# --- S8: the paper's four prompts -----------------------------------------------------------------

SLO_S = 4.5  # the TTFT target of the short prompts


def four_prompts() -> list[Arrival]:
    """A prompt of 8,000 tokens, and three prompts of 2,000 tokens that share their first 1,000.

    The prompts come 10 ms apart.
    """
    long = [block_name(1, i) for i in range(160)]
    shorts = [
        [*(block_name(2, i) for i in range(20)), *(block_name(10 + n, i) for i in range(20))]
        for n in range(3)
    ]
    return [
        Arrival(0.00, 8000, 2, tuple(long)),
        *(Arrival(0.01 * (n + 1), 2000, 2, tuple(shorts[n])) for n in range(3)),
    ]


@pytest.mark.req("S8")
@pytest.mark.parametrize("seed", range(5))
def test_on_demand_forwarding_puts_the_three_short_prompts_on_one_instance(seed: int) -> None:
    """The three prompts take 2 + 1 + 1 s, one after the other. The last prompt gets its token 4 s
    after its arrival, within the target of 4.5 s.
    """
    mesh = play(PAIR, "default", four_prompts(), seed)
    long, *shorts = mesh.served
    assert {s.prefill_id for s in shorts} == ({"prefill-0", "prefill-1"} - {long.prefill_id})
    assert [s.num_cached_tokens for s in shorts] == [0, 1000, 1000]
    assert max(s.ttft_s for s in shorts) < SLO_S


@pytest.mark.req("S7", "S8")
@pytest.mark.parametrize("policy", ["round_robin", "least_connections", "shortest_queue"])
def test_local_queues_put_a_short_prompt_behind_the_long_one(policy: str) -> None:
    """The same instances have one queue each, and a request waits where it was sent.

    Reports are 100 ms old.
    """
    queued = replace(PAIR, prefill_slots=8, chunk_tokens=8000)
    missed = 0
    for seed in range(5):
        _, *shorts = play(queued, policy, four_prompts(), seed).served
        missed += max(s.ttft_s for s in shorts) > SLO_S
    assert missed >= (5 if policy == "round_robin" else 3)


# --- workloads ------------------------------------------------------------------------------------


def test_scaling_keeps_which_prompts_share_prefixes() -> None:
    arrivals = load(1, count=5)
    small = scaled(arrivals, time=0.5, lengths=0.25, block_size=16)
    for before, after in zip(arrivals, small, strict=True):
        assert after.at_s == before.at_s / 2
        assert after.num_prompt_tokens == 160
    heads = {a.scenario: a.blocks[0] for a in small}
    assert all(a.blocks[0] == heads[a.scenario] for a in small)
    assert len(set(heads.values())) == 6


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    arrivals = poisson(load(1, count=500), 20.0, random.Random(1))
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(20.0, rel=0.05)
    assert Counter(a.scenario for a in arrivals)["scenario-0"] == 500


@pytest.mark.req("S2", "S93")
@pytest.mark.parametrize("which", [0, 1])
def test_phi_from_a_profile_is_what_a_full_mesh_carries(which: int) -> None:
    """The profile and the full mesh agree within 15 %. In one case prefill is the bottleneck, in
    the other decode. The master predicts prefill times within 20 %.
    """
    workload = replace(phi_check.WORKLOADS[which], num_requests=1000, num_scenarios=20)
    found = phi_check.check(workload, seed=1)
    assert found.bottleneck == ("prefill", "decode")[which]
    assert abs(found.error_percent) < 15
    assert found.prediction_error_percent < 20
