"""The report of `make bench NAME=handover`."""

from __future__ import annotations

import json

from loadtests.handover.report import Run, Sample, markdown
from loadtests.handover.timing import Timing

WAYS = {"local": 20.0, "whole": 60.0, "per_layer": 30.0, "nixl": 40.0}


def run(rounds: int = 2, **gaps_ms: float) -> Run:
    """Samples in which token 1 comes after 140 ms with NixlConnector, and after 100 ms otherwise.

    Round n is n times as slow, with the same ratios.
    """
    samples = [
        Sample(number, 128, way,
            Timing((140.0 if way == "nixl" else 100.0) * number, gap * number, 10.0, (1, 2, 3)))
        for number in range(1, rounds + 1)
        for way, gap in (WAYS | gaps_ms).items()
    ]  # fmt: skip
    return Run("about", {128: True}, samples)


def cell(text: str, label: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return line.split("|")[2].strip()


def test_the_gap_is_compared_with_that_of_one_engine_and_of_nixl() -> None:
    text = markdown(run())
    name = "token 1 to 2: ours, whole model after prefill"
    assert cell(text, f"{name} / vLLM's NixlConnector") == "1.50 [1.50-1.50]"
    assert cell(text, f"{name} / one engine, nothing handed over") == "3.00 [3.00-3.00]"
    assert cell(text[: text.index("What the hand-over costs")], name) == "90.0 [60.0-120.0]"


def test_the_cost_of_a_variant_is_its_time_beyond_that_of_one_engine() -> None:
    text = markdown(run(rounds=1))
    costs = text[text.index("What the hand-over costs") :]
    costs = costs[: costs.index("| ratio")]
    assert cell(costs, "token 1: vLLM's NixlConnector") == "40.0, 28.6 [28.6-28.6] %"
    assert cell(costs, "token 1 to 2: ours, layer by layer") == "10.0, 33.3 [33.3-33.3] %"


def test_the_report_says_where_ours_is_slower() -> None:
    said = "**Slower than vLLM's NixlConnector** by the median ratio: "
    name = "token 1 to 2: ours, whole model after prefill, 128 tokens"
    assert f"{said}{name} (1.50)." in markdown(run())
    assert f"{said}nowhere." in markdown(run(whole=39.0))


def test_a_run_is_read_back_as_it_was_written() -> None:
    one = run()
    again = Run.from_json(json.loads(json.dumps(one.to_json())))
    assert markdown(again) == markdown(one)
