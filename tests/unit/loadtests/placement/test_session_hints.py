"""The bench of session hints. Its rows differ only in the hints."""

from __future__ import annotations

import pytest

from loadtests.placement.session_hints import play, table


@pytest.mark.req("S108")
def test_agents_reuse_more_if_their_clients_say_when_they_pause_and_are_done() -> None:
    none, both = play("none", 1), play("pauses and done", 1)
    assert both.reuse_percent > none.reuse_percent
    assert both.ttft_ms_p95 < none.ttft_ms_p95
    rows = table([none, both, play("pauses", 1), play("done", 1)]).splitlines()
    assert rows[2].startswith("| none |")
    assert "| 1.00 (1.00..1.00) |" in rows[2]
