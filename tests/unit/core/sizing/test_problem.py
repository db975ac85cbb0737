"""The text of a sizing problem begins with the name of its field."""

from __future__ import annotations

from pdmesh.core.sizing.problem import SizingProblem


def test_the_text_names_the_field() -> None:
    problem = SizingProblem("gpu", "there is none")
    assert (str(problem), problem.field) == ("gpu: there is none", "gpu")
