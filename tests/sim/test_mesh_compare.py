"""The benchmark that compares placement policies on meshes.

Its workloads tell policies apart, and a stored run is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtests.harness.verdicts import OURS
from loadtests.placement import compare as mesh_compare
from loadtests.placement.compare import CASES
from loadtests.placement.compare_report import (
    EVEN_OFF,
    OFF,
    Run,
    page,
)
from loadtests.traffic import replay


def options(case: str, policy: str, seed: int) -> argparse.Namespace:
    arguments = [*shlex.split(CASES[case].arguments), "--policy", policy, "--seed", str(seed)]
    return replay.parser().parse_args(arguments)


def ran(policy: str, **numbers: float) -> Run:
    fields = [f.name for f in dataclasses.fields(Run)][4:]
    values = {**dict.fromkeys(fields, 1.0), **numbers}
    return Run("short chats", policy, 1, CASES["short chats"].arguments, **values)  # type: ignore[arg-type]  # ints too


@pytest.mark.req("S131")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", ["short chats", "long prompts"])
def test_scheduling_takes_thirty_percent_off_the_p95_and_finds_more_of_the_prefixes(
    case: str, seed: int
) -> None:
    """RTP-LLM's two workloads are compared with random choice, on the virtual clock without noise.

    The P95 is used because a mean hides the tail. With one prompt in twenty placed at random, the
    mean is hardly higher.
    """
    ours, off = (mesh_compare.twin_of(options(case, p, seed)) for p in (OURS, OFF))
    assert ours.ttft_ms_p95 <= 0.70 * off.ttft_ms_p95
    assert ours.hit_percent >= CASES[case].least_reuse * off.hit_percent
    assert ours.within_slo_percent >= off.within_slo_percent


def test_an_interrupted_comparison_continues_from_where_it_was(tmp_path: Path) -> None:
    run = ran("default")
    kept = tmp_path / "out.jsonl"
    kept.write_text(json.dumps(asdict(run)) + "\n")
    assert mesh_compare.known(kept) == [run]
    assert mesh_compare.known(tmp_path / "none.jsonl") == []
    assert "short chats" in page([run], {})


def test_the_page_says_what_scheduling_is_worth_and_which_policy_is_best() -> None:
    runs = [
        ran(OURS, ttft_ms_p95=180.0, reused_tokens=138.0, goodput_per_s=9.0,
            twin_within_slo_percent=98.0),
        ran(OFF, ttft_ms_p95=300.0, reused_tokens=46.0, goodput_per_s=9.5,
            twin_within_slo_percent=97.0),
        ran(EVEN_OFF, ttft_ms_p95=225.0, reused_tokens=46.0, goodput_per_s=8.0),
    ]  # fmt: skip
    text = page(runs, {"short chats": 2.0})
    assert "TTFT p95 of ours over `mixed_pool`: 0.60" in text
    assert "bar 0.70: met" in text
    assert "3.0 (3.0..3.0) times; bar 2: met" in text
    assert "goodput/s: **not best**, 9.00 against 9.50 of `mixed_pool`, with one seed" in text
    assert "On the virtual clock ours is better, 98.0 against 97.0" in text
    assert "TTFT p95, ms: ours is best, 180 against 225 of `round_robin`" in text
