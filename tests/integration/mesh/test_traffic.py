"""Tests the generator of realistic load against a server with canned answers. It must send the
requests of the workload at the right times.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from loadtests.harness.generator import canned_server
from loadtests.traffic import services
from loadtests.traffic.loops import (
    Answer,
    Target,
    closed_loop,
    open_loop,
    prompt_tokens,
)
from loadtests.traffic.replay import by_rejections
from loadtests.traffic.report import (
    Run,
    Slo,
    parts,
    write,
)
from loadtests.traffic.workloads import Arrival, chats, prefixed_scenarios


def workload() -> list[Arrival]:
    return prefixed_scenarios(
        random.Random(1),
        num_scenarios=3,
        num_requests=20,
        prefix_tokens=128,
        num_tokens=200,
        num_output_tokens=5,
        rate_per_s=60.0,
    )


async def test_an_open_loop_sends_each_request_at_its_time_and_records_its_answer() -> None:
    arrivals = workload()
    heard: list[Answer] = []
    with canned_server() as port:
        answers = await open_loop(Target("127.0.0.1", port), arrivals, heard.append)
    assert [a.arrival for a in answers] == arrivals
    assert len(heard) == len(arrivals)
    assert all(a.is_answered and a.num_tokens == 5 for a in answers)
    assert all(0 < a.ttft_s <= a.e2e_s for a in answers)
    assert all(a.sent_at >= a.arrival.at_s for a in answers)  # no request may be early


@pytest.mark.req("S65")
async def test_each_user_has_one_request_under_way() -> None:
    numbers = itertools.count()
    with canned_server() as port:
        answers = await closed_loop(
            Target("127.0.0.1", port),
            4,
            lambda: Arrival(float(next(numbers)), 64, 3),
            think_s=lambda: 0.01,
            duration_s=0.5,
        )
    spans = [(a.sent_at, a.sent_at + a.e2e_s) for a in answers]
    under_way = [sum(s <= at < e for s, e in spans) for at, _ in spans]
    assert max(under_way) == 4, "all at once, and no more"
    assert len(answers) > 2 * 4, "each asks again"


async def test_a_missing_server_is_reported_as_status_0() -> None:
    with canned_server() as port:
        pass
    (answer,) = await open_loop(Target("127.0.0.1", port), workload()[:1], lambda _: None)
    assert (answer.status, answer.is_answered) == (0, False)


def test_the_url_determines_host_and_port() -> None:
    target = Target.at("http://mesh.example:8000", names_scenario=True)
    assert (target.host, target.port, target.names_scenario) == ("mesh.example", 8000, True)
    assert Target.at("http://mesh.example").port == 80
    with pytest.raises(ValueError, match="it must look like"):
        Target.at("mesh.example:8000")


def test_equal_names_are_equal_tokens_and_the_rest_differs() -> None:
    first, second = (
        next(a for a in workload()[start:] if a.scenario == "scenario-0") for start in (0, 30)
    )
    tokens = [prompt_tokens(a, 64) for a in (first, second)]
    assert [len(t) for t in tokens] == [200, 200]
    assert tokens[0][:128] == tokens[1][:128]
    assert tokens[0][128:] != tokens[1][128:]


def test_a_chats_turn_begins_with_the_turn_before() -> None:
    turns = chats(
        random.Random(1), num_chats=3, num_turns=4, first_tokens=256, turn_tokens=64,
        num_output_tokens=32, rate_per_s=1.0, think_s=1.0,
    )  # fmt: skip
    for chat in ("chat-0", "chat-1", "chat-2"):
        own = [a for a in turns if a.chat_id == chat]
        assert len(own) == 4
        for before, after in itertools.pairwise(own):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.num_prompt_tokens == before.num_prompt_tokens + 96


@pytest.mark.req("S138")
def test_the_report_counts_goodput_refusals_and_hits_by_scenario() -> None:
    def answer(scenario: str, ttft_s: float, status: int = 200, cached: int = 0) -> Answer:
        arrival = Arrival(0.0, 100, 2, scenario=scenario)
        is_ok = status == 200
        return Answer(arrival, 1.0, 0.0, status, ttft_s, ttft_s + 0.01, 2 * is_ok, cached)

    answers = [answer("a", 0.1, cached=50), answer("a", 9.0), answer("b", 0.2), answer("b", 0, 429)]
    whole, a, b = parts(answers, Slo(1.0, 0.1))
    assert (whole.num_requests, whole.num_refused, whole.num_failed) == (4, 1, 0)
    assert (whole.goodput_per_s, whole.within_slo_percent) == (2.0, 50.0)
    assert (a.hit_percent, b.hit_percent) == (25.0, 0.0)


def test_the_open_loop_of_two_services_has_all_six_scenarios_at_poisson_times() -> None:
    found = services.arrivals(random.Random(1), 600, 20.0)
    assert Counter(a.scenario for a in found).keys() == {s.name for s in services.SCENARIOS}
    assert len({s.service for s in services.SCENARIOS}) == 2
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.15)
    # Exponential gaps have a deviation equal to their mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.2)
    assert len({tuple(prompt_tokens(a, 64)) for a in found}) == 600


def test_calls_are_counted_by_their_number_of_rejections() -> None:
    def bucket(bound: str, value: int) -> str:
        return f'pdmesh_request_rejections_bucket{{le="{bound}",scope="x"}} {value}.0\n'

    page = "".join(
        bucket(b, v) for b, v in (("0.0", 5), ("1.0", 7), ("2.0", 7), ("4.0", 8), ("+Inf", 10))
    )
    assert by_rejections(page) == {"0": 5, "1": 2, "2": 0, "3-4": 1, "5 or more": 2}


@pytest.mark.req("S138")
async def test_a_report_is_a_document_and_a_page_and_says_what_the_generator_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with canned_server() as port:
        answers = await open_loop(Target("127.0.0.1", port), workload(), lambda _: None)
    run = Run(answers, {"prefill-0": 60.0}, {"0": 55.0, "1": 5.0}, ceiling_per_s=2000.0)
    write(run, Slo(1.0, 0.1), tmp_path / "report")
    assert "alone it carries 2000" in capsys.readouterr().out
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["generator_ceiling_per_s"] == 2000.0
    assert found["generator_late_ms_max"] >= 0.0
    assert [p["name"] for p in found["parts"]] == ["all", *(f"scenario-{i}" for i in range(3))]
    assert found["calls_by_rejections"] == {"0": 55.0, "1": 5.0}
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
