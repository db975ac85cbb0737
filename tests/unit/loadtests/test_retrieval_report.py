"""What `make bench NAME=retrieval` says of its rounds."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.kv.retrieval import as_markdown


def rounds(**p90_ms: float) -> list[dict[str, Any]]:
    """One round of each kind; p50 is the same in all."""
    return [
        {
            "kind": kind,
            "time_per_token_ms": {"p50": 20.0, "p90": p90, "p99": 50.0},
            "num_prompts": 100,
            "mib_pulled": 0.0,
            "errors": {},
        }
        for kind, p90 in p90_ms.items()
    ]


@pytest.mark.parametrize(("pulled", "said"), [(21.9, "met."), (22.1, "**unmet** at p90.")])
def test_a_pull_is_held_against_the_same_prompts_without_one(pulled: float, said: str) -> None:
    """Beside streams that run alone it would also pay for the prefill on the same cores."""
    text = as_markdown(rounds(alone=10.0, prefilled=20.0, pulled=pulled))
    assert text.splitlines()[-1].startswith("Bar: pulled / not pulled")
    assert said in text.splitlines()[-1]


def test_the_median_over_neighbours_decides() -> None:
    slow = rounds(alone=10.0, prefilled=20.0, pulled=40.0)
    calm = rounds(alone=10.0, prefilled=20.0, pulled=20.0)
    assert "met." in as_markdown([*calm, *slow, *calm])
    assert "**unmet** at p90" in as_markdown([*slow, *calm, *slow])
