"""Policies on real meshes: what is played tells them apart, and a run that was kept is not played again."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtests import mesh_compare, replay
from loadtests.mesh_compare import CASES, Run


def options(case: str, policy: str) -> argparse.Namespace:
    return replay.parser().parse_args([*shlex.split(CASES[case].arguments), "--policy", policy])


@pytest.mark.req("S131")
@pytest.mark.parametrize("case", ["short chats", "long prompts"])
def test_scheduling_halves_what_is_computed_twice_and_shortens_the_wait(case: str) -> None:
    """On the virtual clock, where nothing disturbs: else the real meshes of the same cases could show nothing."""
    ours, off = (mesh_compare.twin_of(options(case, p)) for p in CASES[case].policies)
    assert ours.hit_percent >= 2 * off.hit_percent
    assert ours.ttft_ms_mean <= 0.75 * off.ttft_ms_mean


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    number = 1.0
    run = Run("short chats", "default", 1, CASES["short chats"].arguments, *[number] * 15)  # type: ignore[arg-type]
    kept = tmp_path / "out.jsonl"
    kept.write_text(json.dumps(asdict(run)) + "\n")
    assert mesh_compare.known(kept) == [run]
    assert mesh_compare.known(tmp_path / "none.jsonl") == []
    assert "short chats" in mesh_compare.table([run])
