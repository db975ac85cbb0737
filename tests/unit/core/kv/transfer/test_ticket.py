"""The log text of a ticket hides its id, and each refusal has a number in the wire format."""

from __future__ import annotations

from pdmesh.core.kv.transfer.ticket import (
    MAX_TICKET_ID,
    Refusal,
    Ticket,
    make_ticket_id,
    shown_ticket_id,
)


def test_no_log_line_contains_the_right_to_pull() -> None:
    ticket_id = make_ticket_id(0x1F, "secret-with-dashes".replace("-", ""))
    assert shown_ticket_id(ticket_id) == "1f"
    ticket = Ticket(ticket_id, "r", 0, "p0", 7, "fp", 8, 64, ("10.0.0.1:7000",), 5000)
    assert "secret" not in repr(ticket)
    assert "10.0.0.1" not in repr(ticket)


def test_a_ticket_id_fits_its_field() -> None:
    assert len(make_ticket_id(2**64 - 1, "0" * 64).encode()) <= MAX_TICKET_ID


def test_each_refusal_has_a_number_of_its_own_that_a_byte_holds() -> None:
    assert len({int(refusal) for refusal in Refusal}) == len(Refusal.__members__), "no alias"
    assert all(0 < refusal < 256 for refusal in Refusal)
