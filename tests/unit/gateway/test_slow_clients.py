"""Clients that read too slowly are disconnected."""

from __future__ import annotations

import math

import pytest

from pdmesh.services.gateway.slow_clients import SlowClients


class Writer:
    def __init__(self, blocked_since: float) -> None:
        self.request_id = "req-1"
        self.blocked_since = blocked_since
        self.num_cuts = 0

    def cut(self) -> None:
        self.num_cuts += 1


@pytest.mark.fault("F28")
def test_only_a_client_that_has_read_nothing_for_longer_than_the_timeout_is_cut() -> None:
    clients = SlowClients("http", write_timeout_s=30.0)
    slow, recent, reading = Writer(100.0), Writer(101.0), Writer(math.inf)
    for writer in (slow, recent, reading):
        clients.add(writer)
    clients.look(130.5)
    assert [w.num_cuts for w in (slow, recent, reading)] == [1, 0, 0]
    clients.remove(slow)
    clients.look(131.5)
    assert [w.num_cuts for w in (slow, recent, reading)] == [1, 1, 0]
    assert len(clients) == 2


@pytest.mark.fault("F28")
def test_a_cut_may_remove_its_writer() -> None:
    """A writer may remove itself as soon as it is cut."""
    clients = SlowClients("grpc", write_timeout_s=1.0)

    class Leaving(Writer):
        def cut(self) -> None:
            clients.remove(self)

    clients.add(Leaving(0.0))
    clients.add(Leaving(0.0))
    clients.look(5.0)
    assert not len(clients)
