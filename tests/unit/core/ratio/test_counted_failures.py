"""Failures that a client's text causes do not affect the ratio of prefills to decodes."""

from __future__ import annotations

import pytest

from pdmesh.core.ratio.counted_failures import is_by_client


@pytest.mark.parametrize(
    ("reason", "by_client"),
    [("CONSTRAINT_UNSATISFIABLE", True), ("OVERLOADED", False), ("ENGINE_FAILED", False),
     ("UNKNOWN", False)],
)  # fmt: skip
def test_only_what_the_client_wrote_does_not_count(reason: str, by_client: bool) -> None:
    assert is_by_client(reason) == by_client
