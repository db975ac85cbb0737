"""On the site, a link to a source file leads to the repository. Without a repository it is text."""

from __future__ import annotations

import pytest

from tools.site_links import linked

WEB = "https://example.org/pdmesh/blob/main"
PAGE = (
    "See [plan.py], [the plan](../libs/plan.py#L3), [groups](groups.md) and [it](https://x.org).\n"
)
PLACES = "[plan.py]: ../libs/plan.py\n[groups.md]: groups.md\n"


def test_links_outside_the_docs_lead_to_the_repository() -> None:
    assert linked(PAGE + PLACES, "life.md", WEB) == (
        f"See [plan.py]({WEB}/libs/plan.py), [the plan]({WEB}/libs/plan.py#L3), "
        "[groups](groups.md) and [it](https://x.org).\n[groups.md]: groups.md\n"
    )


def test_without_a_repository_they_are_text() -> None:
    assert linked(PAGE + PLACES, "life.md", "") == (
        "See `plan.py`, `the plan`, [groups](groups.md) and [it](https://x.org).\n"
        "[groups.md]: groups.md\n"
    )


@pytest.mark.parametrize(
    ("target", "place"),
    [("../../README.md", "README.md"), ("../groups.md", None), ("0001-one.md", None)],
)
def test_a_decision_links_from_its_own_folder(target: str, place: str | None) -> None:
    expected = f"[a]({WEB}/{place})" if place else f"[a]({target})"
    assert linked(f"[a]({target})", "adr/0002-two.md", WEB) == expected


def test_a_label_that_is_code_stays_code() -> None:
    assert linked("[`a.py`](../libs/a.py)", "x.md", "") == "`a.py`"
    assert linked("[`a.py`](../libs/a.py)", "x.md", WEB) == f"[`a.py`]({WEB}/libs/a.py)"
