"""The default score of a prefill: seconds until the first token, and seconds that others lose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pdmesh.core.kv.prefix.prefix_index import NO_PEERS, PeerRuns
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import default
from pdmesh.core.placement.expected_completion import Prices
from pdmesh.core.placement.fleet import LoadReported, PrefillComputed
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Query
from pdmesh.core.placement.predictor import PromptTokens
from tests.support.placements import QUERY, identity, load, make, pair, planned

SELFISH = Prices(future=0.0, eviction=0.0, balance=0.0)


def taught(prices: Prices = SELFISH, **changes: object) -> Placement:
    """Two prefills with a trained predictor. A computed token takes 1 ms, and a fetched one 0.1
    ms.
    """
    placement = make(*pair(**changes))
    placement.policy = default(prices)
    fit = placement.fleet.predictor.fit("f/prefill")
    for num_tokens in range(64, 8192, 64):
        num_reused = num_tokens * (num_tokens // 64 % 5) // 5
        num_fetched = num_reused * (num_tokens // 64 % 2)
        seconds = (num_tokens - num_reused) * 1e-3 + num_fetched * 1e-4
        fit.observe_span((PromptTokens(num_tokens, num_reused, num_fetched),), seconds)
    return placement


def scores(
    placement: Placement, query: Query = QUERY, peers: PeerRuns = NO_PEERS, now: float = 0.0,
    **matches: int,
) -> dict[str, float]:  # fmt: skip
    named = {name.replace("_", "-"): n for name, n in matches.items()}
    plan = placement.plan(query, named, now, peers)
    assert isinstance(plan, Plan)
    return {c.instance_id: c.score for c in plan.prefills}


@pytest.mark.req("S93", "S107")
def test_the_score_is_the_wait_and_the_compute_in_seconds() -> None:
    placement = taught()
    placement.fleet.instances["prefill-0"].available_at = 0.32
    found = scores(placement, prefill_0=6)
    assert found == pytest.approx({"prefill-0": -(0.32 + 0.256), "prefill-1": -0.64}, abs=0.01)


@pytest.mark.req("S77", "S107")
def test_what_a_peer_gives_costs_the_time_of_its_fetch_as_it_was_measured() -> None:
    placement = taught(fetches_from_peers=True)
    found = scores(placement, peers=PeerRuns(((0, 8),)), prefill_0=4)
    fetched = {"prefill-0": 4, "prefill-1": 8}
    assert found == pytest.approx(
        {name: -(0.128 + 64e-4 * num) for name, num in fetched.items()}, abs=0.01
    )


@pytest.mark.req("S107")
def test_the_busier_the_instances_are_the_more_compute_counts_beside_the_wait() -> None:
    """prefill-0 holds six blocks, but the request would wait 0.5 s there. prefill-1 would compute
    0.384 s more.
    """

    def first(used_s: float) -> str:
        placement = taught(replace(SELFISH, future=1.0))
        for instance in placement.fleet.instances.values():
            instance.add_computed(used_s, 0.0)
        placement.fleet.instances["prefill-0"].available_at = 0.5
        return max((s, name) for name, s in scores(placement, prefill_0=6).items())[1]

    assert first(used_s=0.0) == "prefill-1"
    assert first(used_s=30.0) == "prefill-0"


@pytest.mark.req("S108")
def test_agents_one_after_the_other_with_one_system_prompt_use_all_instances() -> None:
    """No instance is busy at any pick, so only the balance of past work can spread the sessions.
    Few turns leave the instance of the session's earlier turns.
    """
    placement = taught(replace(SELFISH, balance=3.0))
    held: dict[str, set[bytes]] = {"prefill-0": set(), "prefill-1": set()}
    homes: dict[int, list[str]] = {}
    now = 0.0
    for number in range(400):
        session, turn = number // 40 * 10 + number % 10, number % 40 // 10
        prompt = [b"system-%d" % i for i in range(8)]
        prompt += [b"%d-%d" % (session, i) for i in range(2 + 2 * turn)]
        query = Query(
            "m", block_hashes=prompt, num_prompt_tokens=64 * len(prompt) + 9,
            chat_id=f"agent-{session}", request_id=f"r{number}",
        )  # fmt: skip
        matches = {
            name: next((i for i, b in enumerate(prompt) if b not in blocks), len(prompt))
            for name, blocks in held.items()
        }
        plan = placement.plan(query, matches, now)
        assert isinstance(plan, Plan)
        name = plan.prefills[0].instance_id
        num_cached = 64 * matches[name]
        homes.setdefault(session, []).append(name)
        held[name].update(prompt)
        seconds = 1e-3 * (query.num_prompt_tokens - num_cached)
        done = PrefillComputed(f"r{number}", query.num_prompt_tokens, num_cached, seconds)
        placement.fleet.handle(
            LoadReported(name, 1, 8, 0, 1000, False, [f"r{number}"], [done]), now + seconds
        )
        now += 2.0
    counts = Counter(name for session in homes.values() for name in session)
    assert max(counts.values()) / 200 <= 1.3
    moved = sum(a != b for session in homes.values() for a, b in pairwise(session))
    assert moved <= 0.05 * 300


@pytest.mark.req("S94")
@pytest.mark.parametrize("chat_id", ["c", ""])
def test_a_lone_conversation_stays_where_its_kv_is(chat_id: str) -> None:
    """The chat's instance has done all recent work. That alone is no reason for the chat to
    leave.
    """
    placement = taught(Prices())
    home, held, now = "", 0, 0.0
    for turn in range(20):
        num_tokens = 640 + 64 * turn
        prompt = [b"%d" % i for i in range(num_tokens // 64)]
        query = Query(
            "m", block_hashes=prompt, num_prompt_tokens=num_tokens, chat_id=chat_id,
            request_id=f"r{turn}",
        )  # fmt: skip
        plan = placement.plan(query, {home: held} if home else {}, now)
        assert isinstance(plan, Plan)
        name = plan.prefills[0].instance_id
        assert name == (home or name), f"turn {turn}"
        seconds = 1e-3 * (num_tokens - 64 * held)
        done = PrefillComputed(f"r{turn}", num_tokens, 64 * held, seconds)
        placement.fleet.handle(
            LoadReported(name, 1, 8, 0, 1000, False, [f"r{turn}"], [done]), now + seconds
        )
        home, held, now = name, len(prompt), now + 5.0


@pytest.mark.req("S108")
def test_a_full_instance_comes_last_however_much_it_holds() -> None:
    placement = taught()
    placement.fleet.handle(load("prefill-0", used=8), now=0.0)
    found = scores(placement, prefill_0=10)
    assert found["prefill-1"] > found["prefill-0"]


def test_a_new_prefix_goes_where_it_evicts_nothing() -> None:
    placement = taught(Prices())
    plan = placement.plan(
        QUERY, {}, 0.0, num_cached={"prefill-0": 1000, "prefill-1": 500}.__getitem__
    )
    assert isinstance(plan, Plan)
    assert plan.prefills[0].instance_id == "prefill-1"


def test_an_instance_that_is_slower_than_its_kind_is_expected_to_be() -> None:
    placement = taught()
    fleet = placement.fleet
    for number in range(400):
        name, factor = f"prefill-{number % 2}", 1 + number % 2
        done = PrefillComputed(f"r{number}", 640, 0, 0.64 * factor)
        fleet.handle(LoadReported(name, 1, 8, 0, 1000, False, (), [done]), float(number))
    fast, slow = (fleet.instances[f"prefill-{i}"].slowness for i in (0, 1))
    assert slow / fast == pytest.approx(2.0, rel=0.15)
    found = scores(placement, now=1000.0)
    assert found["prefill-1"] / found["prefill-0"] == pytest.approx(2.0, rel=0.15)


def test_a_prompt_that_overruns_its_prediction_does_not_make_its_instance_look_idle() -> None:
    placement = taught()
    placement.fleet.predictor.fit("f/prefill").error = 0.2
    planned(placement, replace(QUERY, request_id="long", num_prompt_tokens=8000))
    busy = next(i for i in placement.fleet.instances.values() if i.num_prompts)
    placement.fleet.handle(load(busy.id, used=1, admitted=["long"]), now=0.1)
    found = scores(placement, now=8.5)
    assert found[busy.id] < min(s for name, s in found.items() if name != busy.id)


@pytest.mark.req("S131")
def test_before_any_prompt_was_timed_an_instance_with_a_prompt_does_not_look_idle() -> None:
    """A mesh that has just started predicts with default coefficients, which may be wrong by any
    factor.
    """
    placement = make(*pair())
    placement.policy = default(SELFISH)
    planned(placement, replace(QUERY, request_id="first"))
    busy = next(i for i in placement.fleet.instances.values() if i.num_prompts)
    placement.fleet.handle(load(busy.id, used=1, admitted=["first"]), now=0.1)
    assert busy.available_at < 50.0
    found = scores(placement, now=50.0)
    assert found[busy.id] < min(s for name, s in found.items() if name != busy.id)


def test_the_chats_home_is_preferred_by_a_tenth_of_the_prompts_time() -> None:
    placement = taught(replace(SELFISH, chat=0.1))
    query = replace(QUERY, chat_id="c", request_id="r1")
    home = planned(placement, query).prefills[0].instance_id
    placement.fleet.reservations.drop("r1")
    found = scores(placement, replace(query, request_id="r2"), now=10.0)
    other = next(name for name in found if name != home)
    assert found[home] - found[other] == pytest.approx(0.064, abs=0.01)


def test_a_decode_beside_the_prompt_is_part_of_its_time() -> None:
    placement = make(*(identity(f"fusion-{i}", Role.FUSION) for i in (0, 1)))
    placement.policy = default(SELFISH)
    fit = placement.fleet.predictor.fit("f/fusion")
    for number in range(200):
        num_beside = number % 3 * 2
        fit.observe_span((PromptTokens(640, 0),), 0.1 + 0.05 * (num_beside > 0), 1, num_beside)
    placement.fleet.handle(load("fusion-0", used=4), now=0.0)
    found = scores(placement)
    assert found == pytest.approx({"fusion-0": -0.15, "fusion-1": -0.1}, abs=0.01)


@pytest.mark.req("S93", "S107")
def test_who_decoded_beside_a_prompt_is_what_its_instance_says() -> None:
    """After a prompt, its own sequence decodes. The predictor once took this sequence for one
    beside the prompt.
    """
    placement = make(identity("fusion-0", Role.FUSION))
    fleet = placement.fleet
    for number in range(300):
        num_beside, num_tokens = number % 3 * 2, 200 + number * 97 % 1000
        seconds = 0.02 + 1e-3 * num_tokens + (0.05 + 0.01 * num_beside) * (num_beside > 0)
        done = PrefillComputed(f"r{number}", num_tokens, 0, seconds, 1, float(num_beside))
        used = num_beside + 1
        fleet.handle(LoadReported("fusion-0", 1, 64, used, 1000, False, (), [done]), float(number))
    fit = fleet.predictor.fit("f/fusion")
    assert fit.predict_s(640, 0, num_beside=0) == pytest.approx(0.66, rel=0.02)
    assert fit.predict_s(640, 0, num_beside=4) == pytest.approx(0.75, rel=0.02)


@pytest.mark.req("S93")
def test_a_plan_says_when_it_expects_the_first_token() -> None:
    placement = taught()
    first = [planned(placement, replace(QUERY, request_id=f"r{n}")).first_token_s for n in range(4)]
    assert first == pytest.approx([0.64, 0.64, 1.28, 1.28], abs=0.02), "two prefills, two waits"
    assert planned(placement, replace(QUERY, request_id="late"), now=1.0).first_token_s < 1.0
