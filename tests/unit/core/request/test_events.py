"""The decodes that may take a prefill's KV, and the contents that the repr of an event hides."""

from __future__ import annotations

from pdmesh.core.request.events import (
    Candidate,
    DecodeTokens,
    EmitTokens,
    FirstToken,
    ReleaseTicket,
    SendJoin,
    SendStart,
    TicketHeld,
)


def test_kv_goes_only_between_instances_of_one_group_and_model_in_the_plans_order() -> None:
    decodes = [Candidate("d1", 1, "g/m"), Candidate("d0", 1, "g/other"), Candidate("d2", 1, "g/m")]
    found = Candidate("p0", 1, "g/m").compatible(decodes)
    assert [c.instance_id for c in found] == ["d1", "d2"]
    assert Candidate("p1", 1, "h/m").compatible(decodes) == []


def test_a_story_shows_neither_tokens_nor_tickets() -> None:
    ticket = TicketHeld("777", 10.0, wire="777")
    shown = repr([
        FirstToken(1, 777, None, ticket),
        DecodeTokens(1, (777,)),
        EmitTokens((777,)),
        SendJoin(1, 777),
        SendStart(1, Candidate("d0", 1), 0, ticket, 1, 7),
        ReleaseTicket(1, "777"),
    ])  # fmt: skip
    assert "777" not in shown
