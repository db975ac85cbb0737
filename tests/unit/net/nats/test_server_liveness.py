"""Tests whether the NATS server answers, judged only by the echoes of the client's own messages."""

from __future__ import annotations

import pytest

from pdmesh.net.nats.server_liveness import OUTAGE_S, ServerLiveness, ServerNews

LOST, RESTORED, STILL_LOST = ServerNews.LOST, ServerNews.RESTORED, ServerNews.STILL_LOST


def connected(now: float = 10.0) -> ServerLiveness:
    server = ServerLiveness()
    assert not server.answers(now)
    server.begin(now)
    return server


@pytest.mark.fault("F18")
def test_a_server_without_an_echo_is_lost_once_and_left_at_the_second_look() -> None:
    server = connected(10.0)
    assert server.look(10.0 + OUTAGE_S - 0.01) == []
    assert server.answers(10.0 + OUTAGE_S - 0.01)
    assert server.look(10.0 + OUTAGE_S) == [LOST]
    assert server.look(10.5 + OUTAGE_S) == [STILL_LOST]
    assert not server.answers(10.5 + OUTAGE_S)


def test_echoes_keep_it_up_and_stable_since_it_began() -> None:
    server = connected(10.0)
    for i in range(1, 20):
        assert server.echo(10.0 + i * (OUTAGE_S - 0.1)) == []
    assert server.stable_since == 10.0


@pytest.mark.fault("F18")
def test_an_echo_after_an_outage_restores_it_from_now_on() -> None:
    server = connected(10.0)
    server.look(12.0)
    assert server.echo(13.0) == [RESTORED]
    assert server.stable_since == 13.0
    assert server.answers(13.0)


def test_a_break_that_no_look_saw_is_told_as_both() -> None:
    """The event loop was late, so no check saw the outage. The subscribers must still hear that
    events were lost.
    """
    server = connected(10.0)
    assert server.echo(10.0 + OUTAGE_S) == [LOST, RESTORED]
    assert server.stable_since == 10.0 + OUTAGE_S


def test_the_end_of_the_connection_is_a_loss_at_once_and_only_once() -> None:
    server = connected(10.0)
    assert server.disconnected() == [LOST]
    assert server.disconnected() == []
    assert server.look(10.1) == []  # the last echo is recent, and the client connects again
    assert server.echo(10.2) == [RESTORED]


def test_closing_the_connection_is_no_loss() -> None:
    server = connected(10.0)
    server.end()
    assert server.disconnected() == []
    assert not server.answers(10.0)
