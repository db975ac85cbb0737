"""Tests which connections a full listener drops."""

from __future__ import annotations

from functools import partial

import pytest

from pdmesh.httpd.bounds import Bounds, CutOff

pytestmark = pytest.mark.fault("F29")


class Listener:
    """Connections of several addresses to one listener."""

    def __init__(self, *, most: int, most_per_ip: int, makes_room: bool = True) -> None:
        self.bounds = Bounds(4096, 10.0, most, most_per_ip, makes_room)
        self.dropped: list[str] = []
        self.refused: list[str] = []

    def open(self, *names: str) -> None:
        """Open a connection for each name. The part before the dot is the address."""
        for name in names:
            ip = name.partition(".")[0]
            if self.bounds.enter(ip):
                self.bounds.waits(ip, self.cut_off(name))
            else:
                self.refused.append(name)

    def answer(self, name: str) -> None:
        ip = name.partition(".")[0]
        (cut_off,) = [c for c in self.bounds.waiting if c.args == (name,)]  # type: ignore[attr-defined]  # a partial
        self.bounds.answers(ip, cut_off)

    def cut_off(self, name: str) -> CutOff:
        def leave(name: str) -> None:
            self.dropped.append(name)
            self.bounds.leave(name.partition(".")[0], cut_off)

        cut_off = partial(leave, name)
        return cut_off


def test_an_address_at_its_limit_loses_its_own_oldest_connection() -> None:
    listener = Listener(most=10, most_per_ip=3)
    listener.open("probe.1", "flood.1", "flood.2", "flood.3", "flood.4", "flood.5")
    assert listener.dropped == ["flood.1", "flood.2"]
    assert listener.bounds.num_by_ip == {"probe": 1, "flood": 3}


def test_a_full_listener_drops_a_connection_of_the_address_that_has_most() -> None:
    listener = Listener(most=4, most_per_ip=3)
    listener.open("probe.1", "flood.1", "flood.2", "flood.3", "other.1")
    assert (listener.dropped, listener.refused) == (["flood.1"], [])


def test_among_many_addresses_connections_without_a_request_are_dropped_first() -> None:
    """No address has many connections, so the two of a node's probes are not dropped for that."""
    listener = Listener(most=6, most_per_ip=8)
    listener.open("probe.live", "probe.ready", "a.1", "b.1", "c.1", "d.1")
    for name in ("probe.live", "probe.ready"):
        listener.answer(name)
    listener.open("e.1", "f.1")
    assert (listener.dropped, listener.refused) == (["a.1", "b.1"], [])


def test_connections_that_are_being_answered_are_dropped_last() -> None:
    listener = Listener(most=10, most_per_ip=3)
    listener.open("a.1", "a.2", "a.3")
    listener.answer("a.1")
    listener.open("a.4", "a.5", "a.6")
    assert listener.dropped == ["a.2", "a.3", "a.4"]


def test_a_listener_that_makes_no_room_refuses() -> None:
    listener = Listener(most=2, most_per_ip=2, makes_room=False)
    listener.open("a.1", "a.2", "a.3", "b.1")
    assert (listener.dropped, listener.refused) == ([], ["a.3", "b.1"])
    assert listener.bounds.num_refused == 2
