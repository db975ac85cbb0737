"""The report of `make bench NAME=retrieval`."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.kv.retrieval import as_markdown


def rounds(**mean_ms: float) -> list[dict[str, Any]]:
    """One round of each kind. All rounds have the same quantiles."""
    return [
        {
            "kind": kind,
            "time_per_token_ms": {"mean": mean, "p50": 20.0, "p90": 22.0, "p99": 50.0},
            "num_prompts": 100,
            "mib_pulled": 0.0,
            "errors": {},
        }
        for kind, mean in mean_ms.items()
    ]


@pytest.mark.parametrize(("pulled", "said"), [(20.9, "1.04, met."), (21.2, "1.06, **unmet**.")])
def test_a_decode_that_pulls_is_compared_with_one_that_only_has_streams(
    pulled: float, said: str
) -> None:
    text = as_markdown(rounds(alone=20.0, prefilled=30.0, pulled=pulled))
    assert text.splitlines()[-1].startswith("Bar: pulled / streams alone at most 1.05")
    assert said in text.splitlines()[-1]


def test_the_median_over_neighbours_decides() -> None:
    slow = rounds(alone=20.0, prefilled=20.0, pulled=40.0)
    calm = rounds(alone=20.0, prefilled=20.0, pulled=20.0)
    assert "1.00, met." in as_markdown([*calm, *slow, *calm])
    assert "2.00, **unmet**" in as_markdown([*slow, *calm, *slow])
