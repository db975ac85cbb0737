"""The report of speculation by batch size compares the turns within each round."""

from __future__ import annotations

import pytest

from loadtests.speculation.batches import COPIES, DRAWS, Turn, prompts, rows, table, verdict


def turns(slowdown: float) -> list[Turn]:
    """Proposals halve the time of copies. Draws in batches of 32 take `slowdown` times as long."""
    made = []
    for kind in (COPIES, DRAWS):
        for batch in (1, 32):
            for machine in (1.0, 3.0, 1.5):  # how slow the machine is in a round, for both engines
                ratio = 0.5 if kind == COPIES else slowdown if batch == 32 else 1.0
                num_proposed = 100 if kind == COPIES else 10
                made += [
                    Turn("plain", kind, batch, 100, machine, 2 * machine, 0, 0),
                    Turn(
                        "proposing",
                        kind,
                        batch,
                        100,
                        machine * ratio,
                        2 * machine * ratio,
                        num_proposed,
                        num_proposed // 2,
                    ),
                ]
    return made


@pytest.mark.req("S118")
def test_each_round_is_compared_with_itself() -> None:
    found = {(row.kind, row.batch): row for row in rows(turns(1.0))}
    assert found[COPIES, 1].speeds == [2.0, 2.0, 2.0]
    assert found[COPIES, 32].costs == [0.5, 0.5, 0.5]
    assert found[DRAWS, 32].speeds == [1.0, 1.0, 1.0]
    assert (found[COPIES, 1].proposed, found[COPIES, 1].accepted) == (1.0, 0.5)
    assert table(list(found.values())).count("\n") == 2 + len(found) - 1


@pytest.mark.req("S118")
@pytest.mark.parametrize(("slowdown", "is_met"), [(1.02, True), (1.05, False)])
def test_the_bar_is_about_the_worst_batch(slowdown: float, is_met: bool) -> None:
    text = verdict(rows(turns(slowdown)))
    assert ("**not met**" not in text) == is_met
    assert f"{DRAWS}, batch 32" in text


def test_prompts_differ_by_round_and_are_the_same_for_both_engines() -> None:
    assert prompts(COPIES, 4, 1) == prompts(COPIES, 4, 1)
    assert prompts(DRAWS, 4, 1) != prompts(DRAWS, 4, 2)
    (copy,) = prompts(COPIES, 1, 5)
    assert copy == copy[:20] * 3
